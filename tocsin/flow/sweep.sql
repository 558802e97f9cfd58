-- :name overdue
-- First attempts that did not start before their deadline.
select r.tenant_id, r.id::text as id, r.job_id::text as job_id, r.once
  from runs r
 where r.deadline_at < now() and r.attempt = 0 and r.state in ('staged', 'ready', 'waiting')
 order by r.deadline_at
 limit 1000

-- :name misfired
-- Staged occurrences that nobody could take in time, with what their jobs want done about it.
select r.tenant_id, r.id::text as id, r.job_id::text as job_id, r.once, r.scheduled_for,
       r.ready_at < now() - (j.spec #>> '{schedule,misfire,window}')::interval as too_old,
       coalesce(j.spec #>> '{schedule,misfire,policy}', 'latest') as policy,
       exists (select from runs later
                where later.job_id = r.job_id and later.trigger = 'schedule' and later.attempt = 0
                  and later.state in ('staged', 'ready') and later.ready_at <= now()
                  and later.scheduled_for > r.scheduled_for) as superseded
  from unnest($1::int[]) as l(lane_id)
 cross join lateral (
        select s.* from runs s
         where s.lane_id = l.lane_id and s.state = 'staged' and s.trigger = 'schedule' and s.attempt = 0
           and s.ready_at < now() - interval '60 seconds'
         limit 1000) r
  join jobs j on j.tenant_id = r.tenant_id and j.id = r.job_id

-- :name keep
-- staged → ready: a late occurrence that is to run all the same.
update runs r
   set state = 'ready'
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 where r.tenant_id = k.tenant_id and r.id = k.id and r.state = 'staged'
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name waiting
-- Jobs with runs parked behind a limit or an earlier run: the safety net under the release at report.
select distinct r.tenant_id, r.job_id::text as job_id
  from runs r
 where r.state = 'waiting' and r.blocked_by in ('limit', 'overlap')
 limit 1000

-- :name unpause
-- waiting → ready: parked by a pause that is over.
with chosen as (
    select r.tenant_id, r.id
      from runs r
     where r.state = 'waiting' and r.blocked_by = 'paused'
       and not exists (select from holds h where h.tenant_id = r.tenant_id and h.job_id = r.job_id)
     limit 1000
       for update skip locked
)
update runs r
   set state = 'ready', blocked_by = null, blocked_key = null
  from chosen c
 where r.tenant_id = c.tenant_id and r.id = c.id and r.state = 'waiting'
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name depth
select state, count(*) as runs,
       extract(epoch from now() - min(ready_at) filter (where state in ('staged', 'ready') and ready_at < now()))::float8
           as overdue
  from (select state, ready_at from runs limit 200000) r
 group by state
