-- :name due
-- Backfills of which runs have ended; and ($1) all that have room for another run, or nothing left to wait for. What is
-- of a tenant that has as many runs waiting as it may have, waits; else those would keep others from their turns.
with full_up as materialized (
    select t.id
      from tenants t
     where $1 and t.max_queued is not null
       and exists (select from backfills b where b.tenant_id = t.id and b.state = 'running' and b.next_at is not null)
       and (select count(*)
              from (select from runs r
                     where r.tenant_id = t.id and r.state in ('staged', 'ready', 'waiting') limit t.max_queued) r)
           >= t.max_queued
)
select e.tenant_id, e.backfill_id::text as id
  from (select e.tenant_id, e.backfill_id from backfill_ends e limit 1000) e
union
select b.tenant_id, b.id::text
  from (select * from backfills b where $1 and b.state in ('running', 'paused')) b
 cross join lateral (
        select count(*) as live
          from (select from runs r where r.tenant_id = b.tenant_id and r.backfill_id = b.id limit b.max_concurrency) r) l
 where case when b.next_at is null then l.live = 0 else b.state = 'running' and l.live < b.max_concurrency end
   and (b.next_at is null or b.tenant_id not in (select f.id from full_up f))
 limit $2

-- :name take
-- These backfills with their jobs, held until the runs are made, so that a cancel sees either the runs or none. What
-- somebody else holds is left for another turn: nobody waits, so the order of the locks does not matter.
select b.tenant_id, b.id::text as id, b.job_id::text as job_id, b.state, b.to_at, b.next_at, b.max_concurrency, b.priority,
       b.args, b.failures, j.state as job_state, j.key_template, now() as now
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (
        select * from backfills b
         where b.tenant_id = k.tenant_id and b.id = k.id
         limit 1
           for no key update skip locked) b
 cross join lateral (
        select * from jobs j
         where j.tenant_id = b.tenant_id and j.id = b.job_id
         limit 1
           for share skip locked) j

-- :name room
-- Of these tenants those that have a quota of runs that wait, and how many more they may have.
select t.id, t.max_queued,
       (select count(*)
          from (select from runs r
                 where r.tenant_id = t.id and r.state in ('staged', 'ready', 'waiting') limit t.max_queued) r)::int as queued
  from tenants t
 where t.id = any($1::int[]) and t.max_queued is not null

-- :name nodes
-- How many nodes a run of each of these jobs brings along; none, if it is no workflow.
select k.id::text as id,
       (select count(*) from jobs n where n.tenant_id = k.tenant_id and n.workflow_id = k.id)::int as nodes
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)

-- :name plans
select b.tenant_id, b.id::text as id, b.plan, b.from_at, b.to_at
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (select * from backfills b where b.tenant_id = k.tenant_id and b.id = k.id limit 1) b

-- :name settle
-- How many runs of each live; and what has ended, taken up. After the locks: only who holds a backfill makes runs of it.
-- An end that this does not see yet belongs to a run that it counts as living.
with gone as (
    delete from backfill_ends e
     using unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
     cross join lateral (
            select f.ctid as place from backfill_ends f
             where f.tenant_id = k.tenant_id and f.backfill_id = k.id
             limit 1000) f
     where e.ctid = f.place
    returning e.backfill_id, e.run_id, e.logical_at, e.state
)
select k.id::text as id, null::text as run_id, null::timestamptz as logical_at, null::text as state,
       (select count(*) from runs r where r.tenant_id = k.tenant_id and r.backfill_id = k.id)::int as live
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
union all
select g.backfill_id::text, g.run_id::text, g.logical_at, g.state, 0 from gone g

-- :name save
-- running | paused → completed | cancelled when there is nothing left to do or to wait for.
update backfills b
   set next_at = n.next_at, made = b.made + n.made, succeeded = b.succeeded + n.succeeded,
       failed = b.failed + n.failed, cancelled = b.cancelled + n.cancelled, failures = coalesce(n.failures, b.failures),
       state = n.state,
       finished_at = case when n.state in ('completed', 'cancelled') then coalesce(b.finished_at, now()) end
  from unnest($1::int[], $2::uuid[], $3::timestamptz[], $4::int[], $5::int[], $6::int[], $7::int[], $8::text[], $9::text[])
       as n(tenant_id, id, next_at, made, succeeded, failed, cancelled, failures, state)
 cross join lateral (
        select f.ctid as place from backfills f where f.tenant_id = n.tenant_id and f.id = n.id limit 1) f
 where b.ctid = f.place

-- :name forget
-- Ends of backfills that went with their jobs.
delete from backfill_ends e
 using unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (
        select f.ctid as place from backfill_ends f
         where f.tenant_id = k.tenant_id and f.backfill_id = k.id
         limit 1000) f
 where e.ctid = f.place
   and not exists (select from backfills b where b.tenant_id = k.tenant_id and b.id = k.id offset 0)
