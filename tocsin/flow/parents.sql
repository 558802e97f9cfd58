-- :name ends
-- How those ended that these runs waited for, by the names that their jobs have (in a workflow: the nodes), and what they
-- resulted in; no results where all of a run's are larger together than $3. Of a node that was run once for each element,
-- the list of what these resulted in.
--   $1 tenants  $2 runs  $3 bytes
select k.n::int as n, p.name, p.run_id::text as run_id, p.state, case when p.size <= $3 then p.result end as result, p.size
  from unnest($1::int[], $2::uuid[]) with ordinality as k(tenant_id, id, n)
 cross join lateral (
        select r.parents from runs r
         where (r.tenant_id, r.id) between (k.tenant_id, k.id) and (k.tenant_id, k.id)
         limit 1) r
 cross join lateral (
        select j.name, h.run_id, h.state, e.result,
               sum(200 + coalesce(octet_length(e.result), 0)) over ()::bigint as size
          from unnest(r.parents) as u(id)
         cross join lateral (
                select * from history h where h.tenant_id = k.tenant_id and h.run_id = u.id and h.final limit 1) h
         cross join lateral (
                select coalesce(j.node, j.name, j.id::text) as name from jobs j
                 where j.tenant_id = k.tenant_id and j.id = h.job_id
                 limit 1) j
         cross join lateral (
                select
-- :include ended_with
                as result) e) p

-- :name holds
-- Whether this attempt is under way, and the lease of its worker holds.
select exists (
    select from runs r
     cross join lateral (
            select from workers w
             where w.id = r.worker_id and w.state <> 'gone' and w.lease_until > now()
             limit 1) w
     where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid) and r.fence = $3
       and r.state in ('running', 'stopping'))
