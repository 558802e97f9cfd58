-- :name pools
-- Pools by name, each with what lives in it and who works for it. Bounded: beyond 200,000 live runs it is a sample.
--   $1 only this one  $2 only those behind this name  $3 at most so many  $4 those that are open to this tenant, counting
--   its runs only
with counted as (
    select l.pool, r.tenant_id, r.state, count(*) as runs,
           count(*) filter (where o.open and (r.state = 'ready' or r.state = 'staged' and r.ready_at <= now())) as due,
           min(r.ready_at) filter (where o.open and r.state in ('ready', 'staged') and r.ready_at <= now()) as oldest_due
      from (select lane_id, tenant_id, state, ready_at from runs where $4::int is null or tenant_id = $4
             limit 200000) r
      join lanes l on l.id = r.lane_id
      join pools p on p.name = l.pool
      join tenants t on t.id = r.tenant_id
     -- What may not start for now is no reason to call for workers, nor is anybody late with it.
     cross join lateral (
            select t.suspended_at is null and (p.tenants is null or t.id = any(p.tenants)) as open) o
     group by l.pool, r.tenant_id, r.state
)
select p.name, p.version, p.policy, p.head_start, p.paused_at, p.claimed, now() as now, s.depth, s.due, s.oldest_due,
       q.queues, w.workers, w.slots, p.tenants as open_to,
       case when p.tenants is not null
            then array(select t.slug from tenants t
                        where t.id = any(p.tenants) and ($4::int is null or t.id = $4)
                        order by t.slug) end as tenants
  from pools p
 cross join lateral (
        select coalesce(json_object_agg(c.state, c.runs), '{}')::text as depth, coalesce(sum(c.due), 0)::int as due,
               min(c.oldest_due) as oldest_due
          from (select c.state, sum(c.runs) as runs, sum(c.due) as due, min(c.oldest_due) as oldest_due
                  from counted c
                 where c.pool = p.name
                 group by c.state) c) s
 cross join lateral (
        -- What is due of each tenant, with its weight.
        select coalesce(json_object_agg(c.tenant_id, json_build_array(t.weight, c.due)), '{}')::text as queues
          from (select c.tenant_id, sum(c.due) as due from counted c where c.pool = p.name group by c.tenant_id) c
          join tenants t on t.id = c.tenant_id
         where c.due > 0) q
 cross join lateral (
        select count(*) as workers, coalesce(sum(w.slots), 0)::int as slots
          from workers w
         where w.pool = p.name and w.state = 'live' and w.lease_until > now()) w
 -- That of workflow runs has no workers.
 where p.name <> 'workflows' and ($1::text is null or p.name = $1) and ($2::text is null or p.name > $2)
   -- What others keep to themselves is not a tenant's to see: the name alone tells of them.
   and ($4::int is null or p.tenants is null or $4 = any(p.tenants))
 order by p.name
 limit $3

-- :name lock
select name, version, policy, head_start, paused_at, tenants
  from pools
 where name = $1 and name <> 'workflows'
   for no key update

-- :name change
update pools
   set policy = $2, head_start = $3, paused_at = case when $4 then coalesce(paused_at, now()) end, tenants = $5::int[],
       version = version + 1,
       paused_from = case when not $4 and paused_at is not null then paused_at else paused_from end,
       paused_until = case when not $4 and paused_at is not null then now() else paused_until end
 where name = $1
returning version

-- :name count_claimed
-- In the order of the names, as every server takes them.
update pools p
   set claimed = p.claimed + c.claimed
  from (select * from unnest($1::text[], $2::int[]) as c(name, claimed) order by name) c
 where p.name = c.name
