-- :name due
-- Cursors that fall due within the horizon. A row that another planner holds is its business.
select t.place, j.place as job_place, t.tenant_id, n.slug as tenant, t.job_id::text as job_id, j.name,
       t.next_fire_at, j.version, coalesce(j.anchored_at, j.created_at) as anchor,
       j.schedule, j.zone_rules, now() as now
  from (select t.ctid as place, t.* from triggers t
         where t.next_fire_at <= now() + $1::interval
         order by t.next_fire_at
         limit $2
           for no key update skip locked) t
 cross join lateral (
        select j.ctid as place, j.* from jobs j where j.tenant_id = t.tenant_id and j.id = t.job_id limit 1) j
 cross join lateral (select * from tenants n where n.id = t.tenant_id limit 1) n

-- :name advance
-- Compare-and-set: an occurrence is materialised once, whoever plans and whatever their clocks.
-- The rows are locked by `due`, in this transaction. An edit that committed between its snapshot and its lock has
-- moved the cursor that it read, but not the schedule: the job's version tells, and the next turn plans the new one.
-- Both rows are found at the place where `due` saw them, so that this costs the same however many schedules there are.
-- A job that was changed has moved; what else may have come to its place has another id.
update triggers t
   set next_fire_at = n.next
  from unnest($1::tid[], $2::tid[], $3::uuid[], $4::timestamptz[], $5::timestamptz[], $6::int[])
       as n(place, job_place, job_id, was, next, version)
 cross join lateral (
        select f.ctid as place, f.job_id, f.next_fire_at from triggers f where f.ctid = n.place limit 1) f
 cross join lateral (select j.id, j.version from jobs j where j.ctid = n.job_place limit 1) j
 where f.job_id = n.job_id and f.next_fire_at = n.was and j.id = n.job_id and j.version = n.version
   and t.ctid = f.place
returning t.job_id::text as job_id

-- :name complete_missed
-- One-time jobs that get no run any more. Whoever holds the job may want its trigger, which we hold: then this turn
-- fails at once and the next one does it, instead of waiting in a circle.
with missed as materialized (
    select j.ctid as place
      from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
     cross join lateral (
            select j.ctid, j.once, j.state from jobs j
             where j.tenant_id = k.tenant_id and j.id = k.id
             limit 1
               for no key update nowait) j
     where j.once and j.state in ('active', 'paused')
)
update jobs j
   set state = 'completed', ended_at = now(), updated_at = now()
  from missed m
 where j.ctid = m.place

-- :name any_unclaimed
select exists (select from unclaimed)

-- :name lock_unclaimed
-- A trigger that somebody holds is left for the next turn.
select k.tenant_id, k.job_id::text as job_id
  from (select distinct u.tenant_id, u.job_id from (select * from unclaimed limit 1000) u) k
 cross join lateral (
        select from triggers t
         where t.tenant_id = k.tenant_id and t.job_id = k.job_id
         limit 1
           for no key update skip locked) t

-- :name take_back
-- A statement of its own, after the locks, so that it sees what whoever held them before has written. A parked cursor goes
-- on where it stood; under a pause, it is held there.
with gone as (
    delete from unclaimed u
     using unnest($1::int[], $2::uuid[]) as k(tenant_id, job_id)
     where u.tenant_id = k.tenant_id and u.job_id = k.job_id
    returning u.tenant_id, u.job_id
),
back as materialized (
    select g.tenant_id, g.job_id, g.places, c.place, c.parked, j.state
      from (select tenant_id, job_id, count(*)::int as places from gone group by tenant_id, job_id) g
     cross join lateral (
            select c.ctid as place, c.parked from run_counts c
             where c.tenant_id = g.tenant_id and c.job_id = g.job_id
             limit 1) c
     cross join lateral (select j.state from jobs j where j.tenant_id = g.tenant_id and j.id = g.job_id limit 1) j
),
counted as (
    update run_counts c set used = c.used - b.places, parked = null from back b where c.ctid = b.place
)
update triggers t
   set next_fire_at = case when b.state = 'active' then b.parked end,
       held_at = case when b.state = 'paused' then b.parked end
  from back b
 cross join lateral (
        select t.ctid as place from triggers t
         where t.tenant_id = b.tenant_id and t.job_id = b.job_id and t.next_fire_at is null and t.held_at is null
         limit 1) f
 where b.parked is not null and t.ctid = f.place

-- :name forget_unclaimed
-- Of jobs that are not counted any more.
delete from unclaimed u
 where not exists (select from run_counts c where c.tenant_id = u.tenant_id and c.job_id = u.job_id)

-- :name stuck
-- How many cursors nobody has moved for a minute after their instant, as far as ten thousand.
select count(*) from (select from triggers where next_fire_at < now() - interval '60 seconds' limit 10000) t

-- :name next_due
select min(next_fire_at) from triggers where next_fire_at is not null
