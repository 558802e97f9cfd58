-- :name lock_jobs
-- Lock order everywhere: jobs, triggers, limits by key, runs by id.
select tenant_id, id
  from jobs
 where (tenant_id, id) in (select * from unnest($1::int[], $2::uuid[]))
 order by id
   for no key update

-- :name lock_limits
select tenant_id, key
  from limits
 where (tenant_id, key) in (select * from unnest($1::int[], $2::uuid[]))
 order by key
   for no key update

-- :name stage
-- → staged | ready. The one statement that makes a run. ready_at is never in the past.
insert into runs (tenant_id, id, job_id, job_version, lane_id, state, trigger, priority, scheduled_for, ready_at,
                  order_key, deadline_at, max_attempts, overlap, limited, once, args, tags, origin_run_id)
select j.tenant_id, n.id, j.id, j.version, j.lane_id,
       case when n.scheduled_for > now() then 'staged' else 'ready' end,
       n.trigger, t.priority, n.scheduled_for, t.ready_at,
       t.ready_at - (t.priority - 500) * p.head_start,
       t.ready_at + j.start_deadline,
       j.max_attempts, j.overlap, j.max_concurrency is not null,
       j.once and n.trigger = 'schedule',
       n.args, j.tags, n.origin_run_id
  from unnest($1::int[], $2::uuid[], $3::uuid[], $4::text[], $5::timestamptz[], $6::int[], $7::text[], $8::uuid[])
       as n(tenant_id, id, job_id, trigger, scheduled_for, priority, args, origin_run_id)
  join jobs j on j.tenant_id = n.tenant_id and j.id = n.job_id
  join lanes l on l.id = j.lane_id
  join pools p on p.name = l.pool
 cross join lateral (select greatest(n.scheduled_for, now()) as ready_at, coalesce(n.priority, j.priority) as priority) t
 where j.state in ('active', 'paused') or (j.state = 'completed' and n.trigger in ('retry', 'redrive'))
    on conflict do nothing
returning tenant_id, id::text as id, lane_id, state, ready_at, order_key

-- :name note_missed
-- Occurrences that get no run: one counted row with the reason, never silence.
insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, reason, count, fence, trigger,
                     priority, failures, losses, max_attempts, scheduled_for, ready_at, finished_at, tags)
select j.tenant_id, m.id, 1, j.id, j.version, true, 'skipped', m.reason, m.count, 0, 'schedule',
       j.priority, 0, 0, j.max_attempts, m.scheduled_for, m.scheduled_for, now(), j.tags
  from unnest($1::int[], $2::uuid[], $3::uuid[], $4::text[], $5::int[], $6::timestamptz[])
       as m(tenant_id, id, job_id, reason, count, scheduled_for)
  join jobs j on j.tenant_id = m.tenant_id and j.id = m.job_id

-- :name record_ended
-- For `ended`: deleted rows of runs, with final_state and reason. They had no attempt of their own.
recorded as (
    insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, reason, fence, trigger,
                         priority, failures, losses, max_attempts, scheduled_for, ready_at, finished_at,
                         args, tags, origin_run_id)
    select tenant_id, id, attempt + 1, job_id, job_version, true, final_state, reason, fence, trigger,
           priority, failures, losses, max_attempts, scheduled_for, ready_at, now(),
           args, tags, origin_run_id
      from ended
),
completed as (
    update jobs j
       set state = 'completed', ended_at = now(), updated_at = now()
      from ended e
     where e.once and j.tenant_id = e.tenant_id and j.id = e.job_id and j.state in ('active', 'paused')
)

-- :name end_unheld
-- staged | ready | waiting → $3 (cancelled, expired, skipped). Their jobs are locked already if they are one-time.
with locked as materialized (
    select r.tenant_id, r.id
      from runs r
     where (r.tenant_id, r.id) in (select * from unnest($1::int[], $2::uuid[]))
       and r.state in ('staged', 'ready', 'waiting')
     order by r.id
       for update
),
ended as (
    delete from runs r
     using locked
     where r.tenant_id = locked.tenant_id and r.id = locked.id
    returning r.*, $3::text as final_state, $4::text as reason
),
-- :include record_ended
select tenant_id, id::text as id, job_id::text as job_id, limited, overlap from ended

-- :name release
-- waiting → ready: for each job as many as its limit has room for, and the first that waits for an earlier run.
-- The limit rows are locked already; what is released too early is parked again by the claim.
with freed as (
    select distinct f.tenant_id, f.key, l.max
      from unnest($1::int[], $2::uuid[]) as f(tenant_id, key)
      left join limits l on l.tenant_id = f.tenant_id and l.key = f.key
),
room as (
    select f.tenant_id, f.key,
           case when f.max is null then 1000000
                else f.max - (select count(*) from runs b
                               where b.job_id = f.key and b.limited and b.state in ('running', 'stopping')) end as free
      from freed f
),
chosen as materialized (
    select r.tenant_id, r.id
      from room f
     cross join lateral (
            select w.tenant_id, w.id
              from runs w
             where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'limit'
             order by w.order_key
             limit least(greatest(f.free, 0), 1000)) r
    union
    select r.tenant_id, r.id
      from freed f
     cross join lateral (
            select w.tenant_id, w.id
              from runs w
             where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'overlap'
             order by w.order_key
             limit 1) r
),
locked as materialized (
    select r.tenant_id, r.id
      from runs r
      join chosen c on c.tenant_id = r.tenant_id and c.id = r.id
     where r.state = 'waiting'
     order by r.id
       for update of r
)
update runs r
   set state = 'ready', blocked_by = null, blocked_key = null
  from locked
 where r.tenant_id = locked.tenant_id and r.id = locked.id
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key
