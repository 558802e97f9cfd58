-- :name job_of_cursor
-- For `t`, a cursor.
 cross join lateral (
        select j.ctid as place, j.* from jobs j where j.tenant_id = t.tenant_id and j.id = t.job_id limit 1) j
 cross join lateral (select * from tenants n where n.id = t.tenant_id limit 1) n

-- :name due
-- Lock the cursors of one turn: cursors that fall due within the horizon; some of those that are behind, in the order
-- of their ids; and some of those whose wait reason has ended. None of the three groups hides another. Rows that
-- another planner has locked are skipped.
--   $1 horizon  $2 maximum of due cursors  $3 behind: only ids after this  $4 maximum of cursors that are behind
--   $5 wait reasons that have ended  $6 maximum for each reason  $7 failed: only ids after this
select t.class, t.place, j.place as job_place, t.tenant_id, n.slug as tenant, t.job_id::text as job_id, j.name,
       t.next_fire_at, t.unplanned_since, t.waits_for, t.kept_until, j.version,
       coalesce(j.anchored_at, j.created_at) as anchor, j.schedule, j.zone_rules, now() as now,
       (select p.turned_at from planner p) as turned_at
  from (select d.*
          from (select 'due' as class, t.ctid as place, t.* from triggers t
                 where t.next_fire_at <= now() + $1::interval and t.kept_until is null and t.waits_for is null
                 order by t.next_fire_at
                 limit $2
                   for no key update skip locked) d
        union all
        select b.*
          from (select 'behind' as class, t.ctid as place, t.* from triggers t
                 where t.kept_until is not null and t.waits_for is null and t.job_id > $3::uuid
                 order by t.job_id
                 limit $4
                   for no key update skip locked) b
        union all
        select w.*
          from unnest($5::text[]) as k(reason)
         cross join lateral (
                select 'waiting' as class, t.ctid as place, t.* from triggers t
                 where t.waits_for = k.reason and (k.reason <> 'error' or t.job_id > $7::uuid)
                 order by t.job_id
                 limit $6
                   for no key update skip locked) w) t
-- :include job_of_cursor

-- :name these
-- Lock these cursors as `due` does: one of them made a turn fail.
select 'due' as class, t.place, j.place as job_place, t.tenant_id, n.slug as tenant, t.job_id::text as job_id, j.name,
       t.next_fire_at, t.unplanned_since, t.waits_for, t.kept_until, j.version,
       coalesce(j.anchored_at, j.created_at) as anchor, j.schedule, j.zone_rules, now() as now,
       (select p.turned_at from planner p) as turned_at
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, job_id)
 cross join lateral (
        select t.ctid as place, t.* from triggers t
         where t.tenant_id = k.tenant_id and t.job_id = k.job_id and t.next_fire_at is not null
         limit 1
           for no key update skip locked) t
-- :include job_of_cursor

-- :name reasons
-- At most $2 wait reasons after $1, skipping from one to the next in the index.
with recursive known as (
    (select t.waits_for, 1 as place from triggers t where t.waits_for > $1 order by t.waits_for limit 1)
    union all
    select n.waits_for, k.place + 1
      from known k
     cross join lateral (
            select t.waits_for from triggers t where t.waits_for > k.waits_for order by t.waits_for limit 1) n
     where k.place < $2
)
select waits_for from known

-- :name gap
-- The time since the last completed turn counts as an outage if it is more than a minute.
    insert into outages (from_at, to_at)
    select p.turned_at, now() from planner p where p.turned_at < now() - interval '60 seconds'

-- :name outages
-- The newest $2 outages that may concern a cursor at $1, including the one that ends now. If this turn does not
-- complete, the next one makes the outage longer.
with gap as (
-- :include gap
        on conflict (from_at) do update set to_at = greatest(outages.to_at, excluded.to_at)
    returning from_at, to_at
)
select from_at, to_at from gap
union all
(select o.from_at, o.to_at from outages o where o.to_at > $1 order by o.to_at desc limit $2)

-- :name completed
-- Record a completed turn, at most once a second. An outage that the turn has seen keeps its end. After a clock was set
-- back, records in the future are removed: those turns never happened.
with gap as (
-- :include gap
        on conflict do nothing
),
unreal as (
    delete from outages o where o.to_at > now() and o.from_at >= now()
),
cut as (
    update outages o set to_at = now() where o.to_at > now() and o.from_at < now()
),
old as (
    delete from outages o where o.to_at < now() - interval '400 days'
)
insert into planner (turned_at) values (now())
    on conflict (only_row) do update set turned_at = excluded.turned_at
 where planner.turned_at not between now() - interval '1 second' and now()

-- :name unchanged
 cross join lateral (
        select f.ctid as place, f.job_id, f.next_fire_at from triggers f where f.ctid = n.place limit 1) f
 cross join lateral (select j.id, j.version from jobs j where j.ctid = n.job_place limit 1) j
 where f.job_id = n.job_id and f.next_fire_at = n.was and j.id = n.job_id and j.version = n.version
   and t.ctid = f.place

-- :name advance
-- Compare-and-set: an occurrence is materialised once, whoever plans and whatever their clocks.
-- The rows are locked by `due`, in this transaction. An edit that committed between its snapshot and its lock has
-- moved the cursor that it read, but not the schedule: the job's version tells, and the next turn plans the new one.
-- Both rows are found at the place where `due` saw them, so that this costs the same however many schedules there are.
-- A job that was changed has moved; what else may have come to its place has another id.
update triggers t
   set next_fire_at = n.next, kept_until = n.kept_until, unplanned_since = null, waits_for = null
  from unnest($1::tid[], $2::tid[], $3::uuid[], $4::timestamptz[], $5::int[], $6::timestamptz[], $7::timestamptz[])
       as n(place, job_place, job_id, was, version, next, kept_until)
-- :include unchanged
returning t.job_id::text as job_id

-- :name skip
-- Cursors that this turn could not plan stay where they are and wait, by the same compare-and-set.
update triggers t
   set waits_for = n.reason, unplanned_since = coalesce(t.unplanned_since, least(t.next_fire_at, now()))
  from unnest($1::tid[], $2::tid[], $3::uuid[], $4::timestamptz[], $5::int[], $6::text[])
       as n(place, job_place, job_id, was, version, reason)
-- :include unchanged

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
-- A separate statement after the locks, so that it sees the writes of the previous holders of the locks. A parked cursor
-- continues where it stood; under a pause, it is held there. No node planned it while it was parked.
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
       held_at = case when b.state = 'paused' then b.parked end,
       unplanned_since = b.parked
  from back b
 cross join lateral (
        select t.ctid as place from triggers t
         where t.tenant_id = b.tenant_id and t.job_id = b.job_id and t.next_fire_at is null and t.held_at is null
         limit 1) f
 where b.parked is not null and t.ctid = f.place

-- :name forget_unclaimed
-- Of jobs that are not counted any more, among the first thousand: what `take_back` has left of these is theirs, or held.
delete from unclaimed u
 where u.ctid = any (array(
           select f.ctid
             from (select f.ctid, f.tenant_id, f.job_id from unclaimed f limit 1000) f
            where not exists (select from run_counts c where c.tenant_id = f.tenant_id and c.job_id = f.job_id)))

-- :name stuck
-- How many cursors are still due a minute after their instant, counted up to ten thousand for each class.
select (select count(*)
          from (select from triggers
                 where next_fire_at < now() - interval '60 seconds' and kept_until is null and waits_for is null
                 limit 10000) t)
     + (select count(*)
          from (select next_fire_at from triggers
                 where kept_until is not null and waits_for is null
                   and job_id > '00000000-0000-0000-0000-000000000000'
                 limit 10000) t
         where t.next_fire_at < now() - interval '60 seconds')
     + (select count(*)
          from (select next_fire_at from triggers where waits_for > '' limit 10000) t
         where t.next_fire_at < now() - interval '60 seconds')

-- :name next_due
select min(next_fire_at) from triggers where next_fire_at is not null and kept_until is null and waits_for is null
