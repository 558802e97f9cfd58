-- All of it reads one moment: a transaction that is read-only and repeatable. What is the tenant's own is read behind the
-- wall; then, as the role that sees all tenants, what others have is counted, never named. Every count is bounded.

-- :name live
-- A live run, and what its job and its lane say of it.
select r.state, r.trigger, r.attempt, r.overlap, r.limited, r.blocked_by, r.key_id::text as key_id, r.ready_at, r.order_key,
       greatest(r.claimed_at, r.ready_at) as started_at, r.worker_id::text as worker, r.args, r.job_id::text as job_id,
       r.needs, l.pool, l.kind, l.function, l.labels::text as labels, j.spec, j.key_max, j.rate_gap, j.rate_burst,
       p.policy, p.paused_at as pool_paused_since, h.since as paused_since, m.max as job_max, m.tat as job_tat,
       k.tat as key_tat, c.name as circuit, c.state as circuit_state, c.since as circuit_since,
       c.next_at as circuit_next_at, r.pending_parents, r.workflow_run_id::text as workflow_run_id, now() as now,
       exists (select from unmapped u where u.tenant_id = r.tenant_id and u.run_id = r.id) as folded
  from runs r
  join lanes l on l.id = r.lane_id
  join pools p on p.name = l.pool
 cross join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1) j
  left join lateral (
        select h.since from holds h where h.tenant_id = r.tenant_id and h.job_id = r.job_id limit 1) h on true
  left join lateral (
        select m.max, m.tat from limits m where m.tenant_id = r.tenant_id and m.key = r.job_id limit 1) m on true
  left join lateral (
        select k.tat from limits k where k.tenant_id = r.tenant_id and k.key = r.key_id limit 1) k on true
  left join lateral (
        -- As the claim has it: those sent to try pass.
        select c.name, c.state, c.since, c.next_at from circuits c
         where c.tenant_id = r.tenant_id and c.id = r.circuit_id
           and (c.state = 'open' or c.state = 'half_open' and not r.canary)
         limit 1) c on true
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)

-- :name ended
select h.state, h.outcome, h.reason, h.attempt, h.failures, h.losses, h.max_attempts, h.error_class, h.error, h.count
  from history h
 where h.tenant_id = $1 and h.run_id = $2 and h.final

-- :name lasts
-- How long the job's last runs took that succeeded, on average.
select avg(h.finished_at - h.started_at) as mean
  from (select h.started_at, h.finished_at, h.state
          from history h
         where h.job_id = $2 and h.tenant_id = $1 and h.final
         order by h.run_id desc
         limit 20) h
 where h.state = 'succeeded'

-- :name earlier
-- The runs of the job that an occurrence stands behind, as the claim sees it.
select e.id::text as id, case when e.state in ('running', 'stopping') then greatest(e.claimed_at, e.ready_at) end as since
  from runs e
 where e.tenant_id = $1 and e.job_id = $2 and e.id < $3 and e.trigger <> 'backfill'
   and (e.state in ('ready', 'waiting', 'running', 'stopping')
        or e.state = 'staged' and (e.ready_at <= now() or e.attempt > 0))
 order by e.id
 limit 5

-- :name parents
-- Jobs that a run's job depends on and that have not ended in its chain, each with its live run there if it has one.
select coalesce(j.name, j.id::text) as name, p.id::text as run_id, p.state, j.state as job_state
  from runs r
 cross join lateral (
        select d.parent_id from dependencies d
         where (d.child_id, d.tenant_id) between (r.job_id, r.tenant_id) and (r.job_id, r.tenant_id) offset 0) d
 cross join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = d.parent_id limit 1) j
  left join lateral (
        (select p.id, p.state from runs p where p.job_id = d.parent_id and p.join_key = r.join_key limit 1)
        union all
        (select p.id, p.state from runs p where p.job_id = d.parent_id and p.id = r.join_key limit 1)
        union all
        (select p.id, p.state from runs p
          where r.chain is null and p.job_id = d.parent_id and p.scheduled_for = r.logical_at and p.trigger = 'schedule'
          limit 1)
        limit 1) p on true
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
   and not exists (select from unnest(r.parents) as u(id)
                    cross join lateral (
                          select from history h
                           where h.tenant_id = r.tenant_id and h.run_id = u.id and h.job_id = d.parent_id and h.final
                           limit 1) h)
 order by p.id, name
 limit 5

-- :name nodes_before
-- The same in a workflow run, where every node has its run.
select coalesce(j.node, j.name, j.id::text) as name, p.id::text as run_id, p.state, j.state as job_state
  from runs r
 cross join lateral (
        select p.id, p.state, p.job_id from runs p
         where p.workflow_run_id = r.workflow_run_id and p.feeds @> array[r.id] offset 0) p
 cross join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = p.job_id limit 1) j
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
 order by p.id
 limit 5

-- :name holders
-- Who runs under a limit, the job's own or that of a key; the first of them by name, and how many wait for it before us.
--   $1 tenant  $2 the limit's key  $3 our place  $4 our id  $5 for what they wait  $6 how far to count
with held as (
    (select b.id from runs b
      where b.tenant_id = $1 and b.job_id = $2 and b.limited and b.state in ('running', 'stopping')
      limit $6)
    union all
    (select b.id from runs b
      where b.tenant_id = $1 and b.key_id = $2 and b.state in ('running', 'stopping')
      limit $6)
)
select (select count(*) from held) as running,
       array(select id::text from held order by id limit 5) as runs,
       (select count(*)
          from (select from runs w
                 where w.tenant_id = $1 and w.state = 'waiting' and w.blocked_key = $2 and w.blocked_by = $5
                   and (w.order_key, w.id) < ($3, $4)
                 limit $6) w) as waiting

-- :name beyond
-- From here on what belongs to others may be counted.
set local role tocsin_engine

-- :name quota
-- How many runs of the tenant workers hold, if there is a quota for it.
select (select count(*)
          from workers w
         cross join lateral (
                select from runs r
                 where r.worker_id = w.id and r.state in ('running', 'stopping') and r.tenant_id = $1
                offset 0) r
         where w.state <> 'gone' and w.id <> '00000000-0000-7000-8000-000000000001')::int as running,
       t.max_running as most
  from tenants t
 where t.id = $1 and t.max_running is not null

-- :name standing
-- What the platform has decided about the tenant, and about its place in the pool.
select t.suspended_at, exists (select from pools p where p.name = $2 and t.id <> all (p.tenants)) as shut_out
  from tenants t
 where t.id = $1

-- :name fleet
-- The living workers of a pool, and which of them can take the run: each column counts those of the one before; then what
-- those that are able have, which of them have enough of it, and of these the slots, all and free, and who has room now.
--   $1 pool  $2 kind  $3 function  $4 labels  $5 what it needs, or null  $6 tenant
with living as (
    select w.id, w.slots, w.resources, w.state = 'live' as open, $2 = any(w.targets) as of_kind,
           $2 <> 'python' or $3 = any(w.functions) as knowing, w.labels @> $4::jsonb as labelled
      from workers w
     where w.pool = $1 and w.state <> 'gone' and w.lease_until > now() and (w.serves is null or $6 = any(w.serves))
),
able as materialized (
    select a.slots - h.held as free, a.slots, a.resources, e.enough, e.enough and f.enough as roomy
      from living a
     cross join lateral (
            select (select count(*) from (select from runs r
                                           where r.worker_id = a.id and r.state in ('running', 'stopping')
                                           limit a.slots) r)::int as held,
                   (select array[coalesce(sum(r.needs[1]), 0), coalesce(sum(r.needs[2]), 0), coalesce(sum(r.needs[3]), 0),
                                 coalesce(sum(r.needs[4]), 0)]
                      from runs r
                     where r.worker_id = a.id and r.needs is not null and r.state in ('running', 'stopping')) as used) h
     cross join lateral (
            select coalesce(bool_and(n.need = 0 or a.resources[n.i] >= n.need), true) as enough
              from unnest($5::int[]) with ordinality as n(need, i)) e
     cross join lateral (
            select coalesce(bool_and(n.need = 0 or a.resources[n.i] - h.used[n.i] >= n.need), true) as enough
              from unnest($5::int[]) with ordinality as n(need, i)) f
     where a.of_kind and a.knowing and a.labelled and a.open
)
select count(*)::int as living,
       count(*) filter (where of_kind)::int as of_kind,
       count(*) filter (where of_kind and knowing)::int as knowing,
       count(*) filter (where of_kind and knowing and labelled)::int as labelled,
       (select count(*)::int from able) as able,
       (select coalesce(array_agg(distinct resources), '{}') from able) as totals,
       (select count(*) filter (where enough)::int from able) as fitting,
       (select count(*) filter (where roomy)::int from able) as roomy,
       (select coalesce(sum(slots) filter (where enough), 0)::int from able) as slots,
       (select coalesce(sum(free) filter (where enough), 0)::int from able) as free
  from living

-- :name lanes
-- The lanes that share workers with this one: whoever can take the run takes from them, too.
--   $1 pool  $2 kind  $3 function  $4 labels
select l.id
  from lanes l
 where l.pool = $1
   and exists (
        select from workers w
         where w.pool = $1 and w.state = 'live' and w.lease_until > now()
           and $2 = any(w.targets) and ($2 <> 'python' or $3 = any(w.functions)) and w.labels @> $4::jsonb
           and l.kind = any(w.targets) and (l.kind <> 'python' or l.function = any(w.functions))
           and w.labels @> l.labels)
 limit 500

-- :name mine
-- How many of the tenant's own stand before it in these lanes.
--   $1 tenant  $2 lanes  $3 its place  $4 how far to count  $5 its id
select count(*)
  from (select q.id
          from unnest($2::int[]) as s(lane_id)
         cross join lateral (
                (select r.id, r.order_key from runs r
                  where r.lane_id = s.lane_id and r.tenant_id = $1 and r.state = 'ready' and r.order_key < $3
                  order by r.order_key limit $4)
                union all
                (select r.id, r.order_key from runs r
                  where r.lane_id = s.lane_id and r.tenant_id = $1 and r.state = 'staged' and r.ready_at <= now()
                  order by r.ready_at limit $4)) q
         where q.order_key < $3 and q.id <> $5
         limit $4) q

-- :name others
-- For each other tenant with something in these lanes, its weight and how many it has queued, no further than its share
-- of what starts meanwhile, or, where all tenants stand in one order, before the run's place; skipping from tenant to
-- tenant in the index. Also our own weight.
--   $1 tenant  $2 lanes  $3 how many of the tenant's own stand before the run  $4 how far to count  $5 its place, or null
with recursive us as (
    select weight from tenants where id = $1
),
places as (
    select l.lane_id, h.tenant_id
      from unnest($2::int[]) as l(lane_id)
     cross join lateral (
            select r.tenant_id from runs r
             where r.state = 'ready' and r.lane_id = l.lane_id
             order by r.tenant_id limit 1) h
    union all
    select p.lane_id, h.tenant_id
      from places p
     cross join lateral (
            select r.tenant_id from runs r
             where r.state = 'ready' and r.lane_id = p.lane_id and r.tenant_id > p.tenant_id
             order by r.tenant_id limit 1) h
),
queued as (
    select q.tenant_id, q.weight
      from (select * from places limit 2000) p
      join tenants t on t.id = p.tenant_id
     cross join lateral (
            select t.id as tenant_id, t.weight from runs r
             where r.lane_id = p.lane_id and r.tenant_id = p.tenant_id and r.state = 'ready'
               and r.order_key < coalesce($5::timestamptz, 'infinity')
             limit case when $5 is null then ceil(($3::int + 1) * t.weight::numeric / (select weight from us))
                        else $4 end) q
     where p.tenant_id <> $1
     limit $4
)
select q.weight, count(*)::int as queued, (select weight from us) as ours from queued q group by q.tenant_id, q.weight
