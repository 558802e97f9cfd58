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

-- :name list_live
-- Live runs of a range of ids, newest first. Sections `live_…` are the conditions of the filters.
-- :include live
 where r.tenant_id = $tenant and r.id >= $low::uuid and r.id < $high::uuid
   $ONLY
 order by r.id desc
 limit $most

-- :name list_ended
-- Ended runs of a range of ids, newest first. Sections `ended_…` are the conditions of the filters.
-- :include ended
 where h.tenant_id = $tenant and h.run_id >= $low::uuid and h.run_id < $high::uuid and h.final
   $ONLY
 order by h.run_id desc
 limit $most

-- :name floor_live
-- The id behind that many rows, by the index that `list_live` reads; no row if there are fewer. Run as the engine: for
-- a key of few jobs the policies would discard rows uncounted.
select r.id::text
  from runs r
 where r.tenant_id = $tenant and r.id >= $low::uuid and r.id < $high::uuid
   $ONLY
 order by r.id desc
offset $window
 limit 1

-- :name floor_ended
select h.run_id::text
  from history h
 where h.tenant_id = $tenant and h.run_id >= $low::uuid and h.run_id < $high::uuid
   $ONLY
 order by h.run_id desc
offset $window
 limit 1

-- Each condition with an index is repeated. The equality tells the planner that the index has the right order. The
-- comparison of whole keys makes this index cheaper than a scan of all runs of the tenant, whatever the statistics say.

-- :name live_job
and r.job_id = $job::uuid
and (r.job_id, r.id) >= ($job::uuid, $low::uuid) and (r.job_id, r.id) < ($job::uuid, $high::uuid)
-- :name live_worker
and r.worker_id = $worker::uuid and r.state in ('running', 'stopping')
and (r.worker_id, r.id) >= ($worker::uuid, $low::uuid) and (r.worker_id, r.id) < ($worker::uuid, $high::uuid)
-- :name live_state
and r.state = $state
-- :name live_tag
and r.tags @> $tag::jsonb

-- :name ended_job
and h.job_id = $job::uuid
and (h.job_id, h.run_id) >= ($job::uuid, $low::uuid) and (h.job_id, h.run_id) < ($job::uuid, $high::uuid)
-- :name ended_error_class
and h.final and h.error_class = $error_class
and (h.tenant_id, h.error_class, h.run_id) >= ($tenant, $error_class, $low::uuid)
and (h.tenant_id, h.error_class, h.run_id) < ($tenant, $error_class, $high::uuid)
-- :name ended_outcome
and h.final and h.outcome = $outcome and h.outcome <> 'succeeded'
and (h.tenant_id, h.outcome, h.run_id) >= ($tenant, $outcome, $low::uuid)
and (h.tenant_id, h.outcome, h.run_id) < ($tenant, $outcome, $high::uuid)
-- :name ended_state
and h.final and h.state = $state and h.state <> 'succeeded'
and (h.tenant_id, h.state, h.run_id) >= ($tenant, $state, $low::uuid)
and (h.tenant_id, h.state, h.run_id) < ($tenant, $state, $high::uuid)
-- :name ended_state_succeeded
-- Most runs succeed: an index would cost each of them a write.
and h.state = 'succeeded'
-- :name ended_outcome_succeeded
and h.outcome = 'succeeded'
-- :name ended_worker
and h.worker_id = $worker::uuid
-- :name ended_tag
and h.tags @> $tag::jsonb

-- :name list_cold
-- Ended runs from files, in DuckDB. Only the conditions that were asked for are in the statement, so that DuckDB can
-- skip whole parts of files by their statistics.
-- :include ended_in_files
 where final and tenant_id = $tenant and run_id >= $low::uuid and run_id < $high::uuid
   $ONLY
 order by run_id desc
 limit $most

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
