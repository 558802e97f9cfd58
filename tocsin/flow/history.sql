-- :name live
select r.id::text as id, r.tenant_id, r.job_id::text as job_id, j.name as job_name, r.job_version, r.state,
       null::text as outcome, null::text as reason, r.blocked_by, r.attempt, r.failures, r.losses, r.max_attempts,
       r.fence, r.priority, r.scheduled_for, r.ready_at,
       case when r.state in ('running', 'stopping') then greatest(r.claimed_at, r.ready_at) end as started_at,
       null::timestamptz as finished_at, r.worker_id::text as worker, null::int as exit_code,
       null::text as error_class, null::text as error, r.args, null::text as result, null::text as usage,
       r.tags::text as tags, r.trigger, r.origin_run_id::text as origin_run_id, 1 as count, r.lane_id, r.needs,
       r.progress, r.logical_at, r.workflow_run_id::text as workflow_run_id
  from runs r
  left join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1) j on true

-- :name ended
select h.run_id::text as id, h.tenant_id, h.job_id::text as job_id, j.name as job_name, h.job_version, h.state,
       h.outcome, h.reason, null::text as blocked_by, h.attempt, h.failures, h.losses, h.max_attempts,
       h.fence, h.priority, h.scheduled_for, h.ready_at, h.started_at,
       h.finished_at, h.worker_id::text as worker, h.exit_code,
       h.error_class, h.error, h.args, h.result, h.usage,
       h.tags::text as tags, h.trigger, h.origin_run_id::text as origin_run_id, h.count, null::int as lane_id,
       null::int[] as needs, null::float8 as progress, h.logical_at, h.workflow_run_id::text as workflow_run_id
  from history h
  left join lateral (select * from jobs j where j.tenant_id = h.tenant_id and j.id = h.job_id limit 1) j on true

-- :name get_live
-- A read by id puts up the wall between tenants itself, which saves it two round trips. What is behind `wall` is LATERAL
-- with a LIMIT: it is looked at when the wall stands; before that row-level security would let nothing through.
with wall as materialized (select set_config('tocsin.tenant', $1::int::text, true)::int as tenant_id)
select run.*
  from wall
 cross join lateral (
-- :include live
 where (r.tenant_id, r.id) between (wall.tenant_id, $2::uuid) and (wall.tenant_id, $2::uuid)
 limit 1) run

-- :name get_ended
with wall as materialized (select set_config('tocsin.tenant', $1::int::text, true)::int as tenant_id)
select run.*
  from wall
 cross join lateral (
-- :include ended
 where h.tenant_id = wall.tenant_id and h.run_id = $2 and h.final
 limit 1) run

-- :name list
-- Newest id first over live and ended alike. Each side is cut at the limit before they are merged.
--   $1 tenant  $2 before  $3 job  $4 state  $5 outcome  $6 error class  $7 worker  $8 tag  $9 from  $10 to  $11 limit
select * from (
    (select * from (
-- :include live
 where r.tenant_id = $1 and ($2::uuid is null or r.id < $2) and ($3::uuid is null or r.job_id = $3)
   and ($4::text is null or r.state = $4) and $5::text is null and $6::text is null
   and ($7::uuid is null or r.worker_id = $7) and ($8::jsonb is null or r.tags @> $8)
   and ($9::uuid is null or r.id >= $9) and ($10::uuid is null or r.id < $10)
 order by r.id desc limit $11) live)
union all
    (select * from (
-- :include ended
 where h.tenant_id = $1 and ($2::uuid is null or h.run_id < $2) and ($3::uuid is null or h.job_id = $3) and h.final
   and ($4::text is null or h.state = $4) and ($5::text is null or h.outcome = $5)
   and ($6::text is null or h.error_class = $6)
   and ($7::uuid is null or h.worker_id = $7) and ($8::jsonb is null or h.tags @> $8)
   and ($9::uuid is null or h.run_id >= $9) and ($10::uuid is null or h.run_id < $10)
 order by h.run_id desc limit $11) ended)
) both_sides
order by id desc
limit $11

-- :name list_cold
-- The same from files, in DuckDB. Only conditions that are asked for stand in it: then whole parts of files are passed
-- over by what they say of themselves.
-- :include ended_in_files
 where final and tenant_id = $tenant
   $ONLY
 order by run_id desc
 limit $most

-- :name only_before
and run_id < $before::uuid
-- :name only_job
and job_id = $job::uuid
-- :name only_state
and state = $state
-- :name only_outcome
and outcome = $outcome
-- :name only_error_class
and error_class = $error_class
-- :name only_worker
and worker_id = $worker::uuid
-- :name only_tag
and json_contains(tags, $tag)
-- :name only_since
and run_id >= $since::uuid
-- :name only_until
and run_id < $until::uuid

-- :name attempts
select h.attempt, h.fence, h.outcome, h.started_at, h.finished_at, h.worker_id::text as worker, h.exit_code,
       h.error_class, h.error, h.result, h.usage, h.reason
  from history h
 where h.tenant_id = $1 and h.run_id = $2 and h.outcome is not null
union all
select r.attempt, r.fence, null, greatest(r.claimed_at, r.ready_at), null, r.worker_id::text, null, null, null, null, null,
       null
  from runs r
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid) and r.state in ('running', 'stopping')
order by attempt
