-- :name look
-- What the server must know before it ends these attempts; rows that need nothing special are not answered.
-- No lock: the fence in the statement that follows is the guard.
select i.n, r.tenant_id, r.id::text as id, r.job_id::text as job_id, r.job_version, r.failures, r.losses,
       r.once, r.limited, r.key_id::text as key_id, r.overlap in ('queue', 'queue_all', 'replace') as queues, r.state,
       r.circuit_id::text as circuit_id, r.canary, r.claimed_at, r.feeds is not null or r.joins as awaited,
       r.backfill_id is not null as fills
  from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[]) with ordinality as i(worker_id, id, fence, outcome, n)
 cross join lateral (
        -- The limit keeps the planner from turning the join round: statistics that know of nothing running would make
        -- it read everything that runs once per report.
        select * from runs r
         where (r.worker_id, r.id) between (i.worker_id, i.id) and (i.worker_id, i.id)
           and r.state in ('running', 'stopping')
         limit 1) r
 where r.fence = i.fence
   and (i.outcome <> 'succeeded' or r.once or r.limited or r.circuit_id is not null or r.feeds is not null or r.joins
        or r.backfill_id is not null or r.overlap in ('queue', 'queue_all', 'replace'))

-- :name whose
-- Whose the runs are whose attempts end. Those are not answered that have ended already.
select i.n::int as n, r.tenant_id
  from unnest($1::uuid[], $2::uuid[], $3::bigint[]) with ordinality as i(worker_id, id, fence, n)
 cross join lateral (
        select r.tenant_id, r.fence from runs r
         where (r.worker_id, r.id) between (i.worker_id, i.id) and (i.worker_id, i.id)
           and r.state in ('running', 'stopping')
         limit 1) r
 where r.fence = i.fence

-- :name finish
-- running | stopping → succeeded | dead | cancelled (history and gone), or running → staged (another attempt).
-- A stale fence finds no row, changes nothing, and is not answered. The arrays come in the order of ids, and so do the
-- locks; an array that would hold only nulls may be empty.
--   $1 worker  $2 run  $3 fence  $4 outcome  $5 next state  $6 delay  $7 held_ms  $8 ran_ms  $9 exit code
--   $10 error class  $11 error  $12 result  $13 usage  $14 why the next attempt comes later than its job says
with told as (
    select t.worker_id, t.id, t.fence, coalesce(t.outcome, 'succeeded') as outcome,
           coalesce(t.next, 'succeeded') as next, coalesce(t.delay, 0) as delay, t.held_ms, t.ran_ms, t.exit_code,
           t.error_class, t.error, t.result, t.usage, t.reason
      from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::float8[], $7::float8[],
                  $8::float8[], $9::int[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[])
           as t(worker_id, id, fence, outcome, next, delay, held_ms, ran_ms, exit_code, error_class, error, result, usage,
                reason)
),
held as materialized (
    select r.tenant_id, r.id, r.job_id, r.job_version, r.lane_id, r.attempt, r.fence, r.trigger, r.priority, r.worker_id,
           r.failures + (t.outcome in ('failed', 'timeout'))::int as failures,
           r.losses + (t.outcome = 'lost')::int as losses,
           r.max_attempts, r.scheduled_for, r.ready_at, r.order_key, r.claimed_at, r.once, r.args, r.tags, r.origin_run_id,
           r.logical_at, r.workflow_run_id, r.feeds, r.feeds_on, r.joins, r.join_key, r.chain, r.backfill_id,
           t.outcome, t.delay, t.held_ms, t.ran_ms, t.exit_code, t.error_class, t.error, t.result, t.usage, t.reason,
           -- Success and cancel race: what was done is done; anything else ends the way that was asked for.
           case when r.stop_reason is not null and t.outcome <> 'succeeded' then 'cancelled' else t.next end as next
      from told t
     cross join lateral (
            select * from runs r
             where (r.worker_id, r.id) between (t.worker_id, t.id) and (t.worker_id, t.id)
               and r.state in ('running', 'stopping')
               and r.fence = t.fence
             limit 1
               for update) r
),
-- Narrow, because the rows that a write is joined with are copied whole for each row it writes.
staying as materialized (
    select h.tenant_id, h.id, h.failures, h.losses,
           now() + h.delay * interval '1 second' as ready_at,
           -- Who lost his worker keeps his place: a backlog must not decide how long a loss takes to be made good.
           least(now() + h.delay * interval '1 second' - (h.priority - 500) * p.head_start,
                 case when h.outcome = 'lost' then h.order_key end) as order_key
      from held h
      join lanes l on l.id = h.lane_id
      join pools p on p.name = l.pool
     where h.next = 'staged'
),
leaving as materialized (
    select h.tenant_id, h.id from held h where h.next <> 'staged'
),
-- By key and not by place: a cancel may have moved a row between this statement's snapshot and its lock, and the end
-- must find it all the same.
again as (
    update runs r
       set state = 'staged', failures = s.failures, losses = s.losses, worker_id = null, claim_id = null,
           ready_at = s.ready_at, order_key = s.order_key, canary = false
      from staying s
     where (r.tenant_id, r.id) between (s.tenant_id, s.id) and (s.tenant_id, s.id)
    returning r.tenant_id, r.id, r.lane_id, r.ready_at, r.order_key
),
gone as (
    delete from runs r
     using leaving l
     where (r.tenant_id, r.id) between (l.tenant_id, l.id) and (l.tenant_id, l.id)
),
recorded as (
    insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, reason, fence, trigger,
                         priority, failures, losses, max_attempts, scheduled_for, ready_at, started_at, finished_at,
                         worker_id, exit_code, error_class, error, usage, result, args, tags, origin_run_id, logical_at,
                         workflow_run_id)
    select h.tenant_id, h.id, h.attempt, h.job_id, h.job_version, h.next <> 'staged', h.next, h.outcome,
           case when h.next = 'staged' then h.reason end, h.fence, h.trigger, h.priority, h.failures, h.losses,
           h.max_attempts, h.scheduled_for, h.ready_at,
           s.started_at,
           case when h.outcome = 'lost' then now()
                else least(now(), s.started_at + h.ran_ms * interval '1 millisecond') end,
           h.worker_id, h.exit_code, h.error_class, h.error, h.usage, h.result, h.args, h.tags, h.origin_run_id,
           h.logical_at, h.workflow_run_id
      from held h
     cross join lateral (
            -- Cancelled before its instant: the worker had it, but never began.
            select case when h.outcome = 'cancelled' and h.ready_at > now() then null
                        else least(now(), greatest(h.ready_at, h.claimed_at + h.held_ms * interval '1 millisecond'))
                   end as started_at) s
),
buried as (
    insert into dead_letters (tenant_id, run_id, job_id, job_version, priority, error_class, error, args, tags, logical_at)
    select tenant_id, id, job_id, job_version, priority, error_class, error, args, tags,
           coalesce(logical_at, case when trigger = 'schedule' then scheduled_for end)
      from held
     -- What dies within a workflow is run again with it: the letter is the workflow run's.
     where next = 'dead' and (workflow_run_id is null or worker_id = '00000000-0000-7000-8000-000000000001')
),
filled as (
    insert into backfill_ends (tenant_id, backfill_id, run_id, logical_at, state)
    select tenant_id, backfill_id, id, logical_at, next from held where backfill_id is not null and next <> 'staged'
),
ended as materialized (
    select tenant_id, job_id, once from held where once and next <> 'staged'
),
-- :include complete_jobs
select id::text as id, fence, null::int as tenant_id, null::int as lane_id, null::timestamptz as ready_at,
       null::timestamptz as order_key,
-- :include family
  from (select id, fence, tenant_id, job_id, next as final_state, null::text as reason, feeds, feeds_on, joins, trigger,
               join_key, chain, logical_at, scheduled_for
          from held
         where next <> 'staged') h
union all
select h.id::text, h.fence, a.tenant_id, a.lane_id, a.ready_at, a.order_key, null
  from again a
 cross join lateral (select * from held h where h.tenant_id = a.tenant_id and h.id = a.id limit 1) h

-- :name partitions
-- The days that have a partition, by the partition's name.
select c.relname::text as name
  from pg_inherits i
  join pg_class c on c.oid = i.inhrelid
 where i.inhparent = 'history'::regclass

-- :name repeated
-- Reports that were accepted before: the same attempt, fence and outcome stand in history already.
select i.id::text as id, i.fence
  from unnest($1::uuid[], $2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::int[])
       as i(worker_id, id, attempt, fence, outcome, tenant_id)
 cross join lateral (
        select * from history h where h.tenant_id = i.tenant_id and h.run_id = i.id and h.attempt = i.attempt limit 1) h
 where h.fence = i.fence and h.worker_id = i.worker_id and h.outcome = i.outcome

-- :name repeated_anywhere
-- For workers of an older build, which do not name the tenant: search each tenant's index. All reports of this server
-- wait for the result, so there are at most $6 searches. Reports beyond that get no result; the first always does.
select i.n::int as n,
       exists (select from tenants t
                cross join lateral (
                       select * from history h
                        where h.tenant_id = t.id and h.run_id = i.id and h.attempt = i.attempt
                        limit 1) h
                where h.fence = i.fence and h.worker_id = i.worker_id and h.outcome = i.outcome) as found
  from unnest($1::uuid[], $2::uuid[], $3::int[], $4::bigint[], $5::text[]) with ordinality
       as i(worker_id, id, attempt, fence, outcome, n)
 where i.n <= greatest(1, $6::bigint / (select count(*) from tenants))

-- :name returning
-- The jobs and limits that may have to be locked before these runs are handed back, since that may end some of them.
-- This takes no lock: the fence in the next statement is the guard.
select r.tenant_id, r.job_id::text as job_id, r.key_id::text as key_id, r.once,
       r.limited or coalesce(r.overlap in ('queue', 'queue_all', 'replace'), false) as gated
  from unnest($1::uuid[], $2::uuid[], $3::bigint[]) as t(worker_id, id, fence)
 cross join lateral (
        select * from runs r
         where (r.worker_id, r.id) between (t.worker_id, t.id) and (t.worker_id, t.id)
           and r.state in ('running', 'stopping')
         limit 1) r
 where r.fence = t.fence

-- :name give_back
-- running → ready: handed back before it started, which costs neither a failure nor a loss; → cancelled if it was to
-- be stopped. By key and not by place, as above: a cancel may have moved the row meanwhile.
-- → staged if its instant has not come, or if it must not be claimed for a while ($4 seconds). Then it counts as never
-- claimed: its deadline applies, and a pause or an edit retracts it. Only the fence keeps its value.
with told as (
    select t.worker_id, t.id, t.fence,
           case when t.delay > 0 then now() + t.delay * interval '1 second' end as not_before
      from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::float8[]) as t(worker_id, id, fence, delay)
),
held as materialized (
    select r.tenant_id, r.id, r.stop_reason, t.not_before, greatest(r.ready_at, t.not_before) > now() as early
      from told t
     cross join lateral (
            select r.tenant_id, r.id, r.stop_reason, r.ready_at from runs r
             where (r.worker_id, r.id) between (t.worker_id, t.id) and (t.worker_id, t.id)
               and r.state in ('running', 'stopping')
               and r.fence = t.fence
             limit 1
               for update) r
),
back as (
    update runs r
       set state = case when h.early then 'staged' else 'ready' end, attempt = r.attempt - h.early::int,
           ready_at = greatest(r.ready_at, h.not_before), worker_id = null, claim_id = null
      from held h
     where h.stop_reason is null and (r.tenant_id, r.id) between (h.tenant_id, h.id) and (h.tenant_id, h.id)
    returning r.tenant_id, r.id, r.fence, r.lane_id, r.ready_at, r.order_key
),
ended as (
    delete from runs r
     using held h
     where h.stop_reason is not null and (r.tenant_id, r.id) between (h.tenant_id, h.id) and (h.tenant_id, h.id)
    returning r.*, 'cancelled' as final_state, 'cancelled' as reason, null::text as error
),
-- :include record_ended
select id::text as id, fence, tenant_id, lane_id, null::timestamptz as ready_at, null::timestamptz as order_key,
       job_id::text as job_id, key_id::text as key_id,
-- :include family
  from ended
union all
select id::text, fence, tenant_id, lane_id, ready_at, order_key, null, null, null from back

-- :name claims_after
-- What a living worker was given after the last claim it knows of: its answer was lost. While the clock is set back all
-- that is claimed seems to be older than what the worker has heard: the claims' numbers tell, and for a worker that does
-- not know those, a time that is still to come proves nothing.
select r.id::text as id, r.fence
  from runs r
 where r.worker_id = $1 and r.state in ('running', 'stopping') and r.claim_id > $2
   and ($3::timestamptz is null
        or r.claimed_at < $3 and case when $4::bigint is null then $3 <= now() else r.claim_id <= $4 end)

-- :name held
-- All that a worker holds by our book, for a heartbeat to be compared with, and whether it was claimed before the time
-- that the worker had heard of when it asked (by the same proof).
select r.id::text as id, r.fence, r.claim_id, r.state, coalesce(r.stop_reason, '') as stop_reason,
       coalesce(r.claimed_at < $2 and case when $3::bigint is null then $2 <= now() else r.claim_id <= $3 end, false)
           as claimed_before
  from runs r
 where r.worker_id = $1 and r.state in ('running', 'stopping')

-- :name attempt_of
-- The attempt of a run that has this fence, while the lease of its worker holds, or had it.
select r.worker_id::text as worker_id, r.attempt, null::text as outcome, r.tenant_id, r.id::text as id,
       r.job_id::text as job_id, r.job_version, r.args, null::text as checkpoint
  from runs r
 cross join lateral (
        select from workers w
         where w.id = r.worker_id and w.state <> 'gone' and w.lease_until > now()
         limit 1) w
 where (r.tenant_id, r.id) between ($1, $2) and ($1, $2) and r.fence = $3 and r.state in ('running', 'stopping')
union all
select h.worker_id::text, h.attempt, h.outcome, null, null, null, null, null, null
  from history h
 where h.tenant_id = $1 and h.run_id = $2 and h.fence = $3 and h.outcome is not null
 limit 1
