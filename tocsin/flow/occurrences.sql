-- :name steady
-- All that follows sees one moment: a run that ends meanwhile is neither missed nor met twice.
set transaction isolation level repeatable read, read only

-- :name job
select j.name, j.once, j.created_at, j.ended_at, coalesce(j.anchored_at, j.created_at) as anchor,
       j.schedule, t.next_fire_at, t.held_at, u.since as by_calendar_since, c.used, c.parked, now() as now
  from jobs j
  left join calendar_uses u on u.tenant_id = j.tenant_id and u.job_id = j.id
  left join triggers t on t.tenant_id = j.tenant_id and t.job_id = j.id
  left join run_counts c on c.tenant_id = j.tenant_id and c.job_id = j.id
 where j.tenant_id = $1 and j.id = $2

-- :name versions
-- Versions whose schedule was replaced by another, newest first.
select v.spec ->> 'name' as name, (v.spec -> 'schedule')::text as schedule, v.spec::text as spec, v.anchor, v.owed_until,
       v.successor_after
  from job_versions v
 where v.tenant_id = $1 and v.job_id = $2 and v.owed_until is not null
 order by v.version desc
 limit $3

-- :name records
-- Live, counted and final rows of a job's schedule behind a place. Those that began in time (within a minute) are found
-- by their ids, and are the first in the order of ids only, which is about that of their instants; late ones by an index
-- of their own. No id is older than the instants it stands for, so that days before are not looked at.
--   $1 tenant  $2 job  $3 the place: first instant  $4 and id  $5 before  $6 $7 the ids there may be  $8 limit
--   $9 limit of those found by id
(select r.id::text as id, r.scheduled_for as first, r.scheduled_for as last, 1 as count, r.state,
        null::text as reason, true as live, r.attempt > 0 as started, false as by_id
   from runs r
  where r.tenant_id = $1 and r.job_id = $2 and r.trigger = 'schedule'
    and (r.scheduled_for, r.id) > ($3, $4::uuid) and r.scheduled_for < $5
  order by r.scheduled_for
  limit $8)
union all
(select h.run_id::text, h.first_for, h.scheduled_for, h.count, h.state, h.reason, false, false, false
   from history h
  where h.tenant_id = $1 and h.job_id = $2 and h.run_id >= $6::uuid
    and (h.first_for, h.run_id) > ($3, $4::uuid) and h.first_for < $5
  order by h.first_for, h.run_id
  limit $8)
union all
(select h.run_id::text, h.scheduled_for, h.scheduled_for, 1, h.state,
        h.reason, false, h.outcome is not null or h.attempt > 1, false
   from history h
  where h.tenant_id = $1 and h.job_id = $2 and h.trigger = 'schedule' and h.final and h.run_id >= $6::uuid
    and h.first_for is null and h.ready_at - h.scheduled_for > interval '1 minute'
    and (h.scheduled_for, h.run_id) > ($3, $4::uuid) and h.scheduled_for < $5
  order by h.scheduled_for, h.run_id
  limit $8)
union all
(select h.run_id::text, h.scheduled_for, h.scheduled_for, 1, h.state,
        h.reason, false, h.outcome is not null or h.attempt > 1, true
   from history h
  where h.tenant_id = $1 and h.job_id = $2 and h.trigger = 'schedule' and h.final
    and h.run_id >= $6::uuid and h.run_id < $7::uuid
    and h.first_for is null and h.ready_at - h.scheduled_for <= interval '1 minute'
    and (h.scheduled_for, h.run_id) > ($3, $4::uuid) and h.scheduled_for < $5
  order by h.run_id
  limit $9)

-- :name records_in_files
-- The same of archived days, in DuckDB. `$afresh`: with the counted row that begins before `$first` and reaches it.
select run_id::varchar as id, coalesce(first_for, scheduled_for) as first, scheduled_for as last,
       case when first_for is null then 1 else count end as count, state, reason, false as live,
       first_for is null and (outcome is not null or attempt > 1) as started
  from
-- :include rows_of_files
 where tenant_id = $tenant and job_id = $job::uuid and (first_for is not null or trigger = 'schedule' and final)
   and coalesce(first_for, scheduled_for) < $before
   and (coalesce(first_for, scheduled_for) > $first
        or coalesce(first_for, scheduled_for) = $first and run_id > $id::uuid
        or $afresh and first_for is not null and scheduled_for >= $first)
 order by 2, 1
 limit $most

-- :name begun_before
-- The counted row that begins before an instant and reaches it, if there is one.
select c.* from (
    select h.run_id::text as id, h.first_for as first, h.scheduled_for as last, h.count, h.state, h.reason,
           false as live, false as started, false as by_id
      from history h
     where h.tenant_id = $1 and h.job_id = $2 and h.first_for < $3
     order by h.first_for desc
     limit 1) c
 where c.last >= $3
