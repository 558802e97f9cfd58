-- :name unstopped
-- Something of a workflow run lives that was not told to stop. The run of a mapped node is told by its reason alone.
exists (select from runs n
         where n.workflow_run_id = coalesce(r.workflow_run_id, r.id) and n.tenant_id = r.tenant_id and n.id <> r.id
           and n.state <> 'stopping' and not (n.map = '{}' and n.stop_reason is not null))

-- :name heads
-- Workflow runs that are held and want something done: `begin` (they were claimed), `end` (all their nodes have ended), or
-- `stop` (they are to stop, or their time is up, and something of them was not told so).
-- What is to be done is few and found by indexes, what merely runs may be many. So may be those that wait for the proofs
-- of what they stopped: each kind is counted by itself, and these are left out, so that they keep nobody back.
(select r.tenant_id, r.id::text as id, case when r.pending_parents is null then 'begin' else 'end' end as what
   from runs r
  where r.worker_id = '00000000-0000-7000-8000-000000000001'
    and (r.pending_parents is null or r.pending_parents = 0 or r.state = 'stopping')
    and (r.pending_parents is null or r.pending_parents = 0)
  order by r.id
  limit $1)
union all
(select r.tenant_id, r.id::text, 'stop'
   from runs r
  where r.worker_id = '00000000-0000-7000-8000-000000000001'
    and (r.pending_parents is null or r.pending_parents = 0 or r.state = 'stopping')
    and r.state = 'stopping' and r.pending_parents > 0 and
-- :include unstopped
  order by r.id
  limit $1)
union all
(select r.tenant_id, r.id::text, 'stop'
   from runs r
  where r.worker_id = '00000000-0000-7000-8000-000000000001'
    and r.state = 'running' and r.pending_parents > 0 and r.deadline_at < now() and
-- :include unstopped
  order by r.deadline_at
  limit $1)

-- :name lock_head
-- A workflow run and its workflow, which no edit changes meanwhile. The workflow is taken first, as everywhere: that the
-- run is looked up by the workflow's tenant keeps the planner from turning that round.
with workflow as materialized (
    select j.*
      from runs r
     cross join lateral (
            select * from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1 for share) j
     where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
)
select r.id::text as id, r.state, r.pending_parents, r.args, r.priority, r.trigger, r.scheduled_for,
       coalesce(r.logical_at, r.scheduled_for) as logical_at, coalesce(r.workflow_run_id, r.id)::text as workflow_run_id,
       w.id::text as job_id, w.version, w.spec, w.priority as usual_priority, statement_timestamp() as now,
       -- The node whose run it is to run again, if it is not the whole.
       (select n.node
          from history h
         cross join lateral (select * from jobs n where n.tenant_id = $1 and n.id = h.job_id limit 1) n
         where h.tenant_id = $1 and h.run_id = r.origin_run_id and h.final) as only,
       -- Two that were asked at once to run the same again, which servers of earlier releases allow: the first does.
       exists (select from runs o
                where o.tenant_id = $1 and o.job_id = w.id and o.id < r.id
                  and o.workflow_run_id = r.workflow_run_id) as is_second
  from workflow w
 cross join lateral (
        select * from runs r
         where (r.tenant_id, r.id) between (w.tenant_id, $2::uuid) and (w.tenant_id, $2::uuid)
           and r.state in ('running', 'stopping') and r.worker_id = '00000000-0000-7000-8000-000000000001'
         limit 1
           for update) r

-- :name skip
-- running | stopping → skipped: a second head of a workflow run, which is held already. It tells nobody: the first will.
with ended as (
    delete from runs r
     where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid) and r.state in ('running', 'stopping')
    returning r.*, 'skipped' as final_state, 'coalesced' as reason, null::text as error
),
-- :include record_ended
select id from ended

-- :name begun
-- It waits for so many nodes, keeps the graph that it began with, and has so much time. $6: what those that are not run
-- mean for its end.
update runs r
   set pending_parents = $3, job_version = $4, deadline_at = now() + $5::interval,
       doomed = $6
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)

-- :name head
select r.state, coalesce(r.workflow_run_id, r.id)::text as workflow_run_id, r.attempt, r.fence, r.doomed, r.pending_parents,
       coalesce(r.stop_reason, '') as stop_reason, r.state = 'running' and r.deadline_at < now() as late,
       extract(epoch from now() - r.claimed_at)::float8 * 1000 as ran_ms
  from runs r
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid) and r.state in ('running', 'stopping')
