-- :name job
select name, node, schedule, coalesce(anchored_at, created_at) as anchor, created_at, now() as now
  from jobs
 where tenant_id = $1 and id = $2

-- :name done
-- The instants of a range that a run of a job stands for which lives, or had an attempt ($6: succeeded). Of a schedule's
-- instant no id is older ($5); what was run for it again may be much younger.
--   $1 tenant  $2 job  $3 from  $4 before  $5 the lowest id there may be
select distinct f.instant
  from (select coalesce(r.logical_at, r.scheduled_for) as instant
          from runs r
         where r.tenant_id = $1 and r.job_id = $2 and (r.logical_at is not null or r.trigger = 'schedule')
        union all
        select coalesce(h.logical_at, h.scheduled_for)
          from history h
         where h.tenant_id = $1 and h.job_id = $2 and h.run_id >= $5::uuid and h.final
           and (h.logical_at is not null or h.trigger = 'schedule')
           and case when $6 then h.state = 'succeeded' else h.outcome is not null or h.attempt > 1 end) f
 where f.instant >= $3 and f.instant < $4

-- :name done_in_files
-- The same of archived days, in DuckDB.
select distinct coalesce(logical_at, scheduled_for) as instant
  from
-- :include rows_of_files
 where tenant_id = $tenant and job_id = $job::uuid and final and (logical_at is not null or trigger = 'schedule')
   and case when $well then state = 'succeeded' else outcome is not null or attempt > 1 end
   and coalesce(logical_at, scheduled_for) >= $from and coalesce(logical_at, scheduled_for) < $to

-- :name hold_job
-- Whoever asks for a backfill holds the job: a cancel sees either the backfill or none, and of two that ask for the same
-- the second sees the first.
select state, sensitive, key_template, now() as now from jobs where tenant_id = $1 and id = $2 for no key update

-- :name open
select count(*)
  from (select from backfills b where b.tenant_id = $1 and b.state in ('running', 'paused') limit $2) b

-- :name another
-- One of the job that is open and has instants of this range, with the same arguments.
select b.id::text
  from backfills b
 where b.tenant_id = $1 and b.job_id = $2 and b.state in ('running', 'paused') and b.from_at < $4 and b.to_at > $3
   and b.args is not distinct from $5
 order by b.id
 limit 1

-- :name store
insert into backfills (tenant_id, id, job_id, from_at, to_at, plan, next_at, total, max_concurrency, priority, args, rerun)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)

-- :name with_ends
-- With what has ended and was not taken up yet, so that the numbers add up at any moment.
select b.id::text as id, b.job_id::text as job_id, j.name as job_name, b.state, b.from_at, b.to_at, b.rerun, b.total, b.made,
       (select count(*) from runs r where r.tenant_id = b.tenant_id and r.backfill_id = b.id) as live,
       b.succeeded + e.succeeded as succeeded, b.failed + e.failed as failed, b.cancelled + e.cancelled as cancelled,
       b.failures, b.next_at, b.max_concurrency, b.priority, b.args, b.created_at, b.finished_at
  from backfills b
  join jobs j on j.tenant_id = b.tenant_id and j.id = b.job_id
 cross join lateral (
        select count(*) filter (where e.state = 'succeeded') as succeeded,
               count(*) filter (where e.state in ('dead', 'expired')) as failed,
               count(*) filter (where e.state in ('cancelled', 'skipped')) as cancelled
          from backfill_ends e
         where e.tenant_id = b.tenant_id and e.backfill_id = b.id) e

-- :name get
-- :include with_ends
 where b.tenant_id = $1 and b.id = $2

-- :name list
-- Backfills of a range of ids, newest first. Sections `only_…` are the conditions of the filters.
-- :include with_ends
 where b.tenant_id = $tenant and b.id >= $low::uuid and b.id < $high::uuid
   $ONLY
 order by b.id desc
 limit $most

-- :name floor
-- The id behind that many backfills; no row if there are fewer.
select b.id::text
  from backfills b
 where b.tenant_id = $tenant and b.id >= $low::uuid and b.id < $high::uuid
   $ONLY
 order by b.id desc
offset $window
 limit 1

-- :name only_job
-- By its index: history.sql explains why the condition is repeated.
and b.job_id = $job::uuid
and (b.tenant_id, b.job_id, b.id) >= ($tenant, $job::uuid, $low::uuid)
and (b.tenant_id, b.job_id, b.id) < ($tenant, $job::uuid, $high::uuid)
-- :name only_state
and b.state = $state

-- :name lock
select state from backfills where tenant_id = $1 and id = $2 for no key update

-- :name job_of
select job_id::text as job_id from backfills where tenant_id = $1 and id = $2

-- :name set_state
update backfills
   set state = $3, finished_at = case when $3 = 'cancelled' then now() end
 where tenant_id = $1 and id = $2 and state in ('running', 'paused')

-- :name keys
-- The concurrency keys of its runs: one, unless an edit of the job came between.
select distinct r.key_id::text as key_id
  from runs r
 where r.tenant_id = $1 and r.job_id = $2 and r.backfill_id = $3
