-- What PostgreSQL can do at best on our own tables: the plainest statements that move rows the same way.

-- :name claim
-- The limit is written out: of a parameter the planner knows nothing, guesses 5,000 rows and merges whole indexes.
update runs r
   set state = 'running', attempt = r.attempt + 1, fence = r.fence + 1, claim_id = 1, worker_id = $1,
       claimed_at = now()
  from (select tenant_id, id
          from runs
         where lane_id = 1 and tenant_id = 1 and state = 'ready'
         order by order_key
         limit 500
           for update skip locked) s
 where r.tenant_id = s.tenant_id and r.id = s.id
returning r.id, r.job_id, r.attempt, r.fence, r.args

-- :name complete
with gone as (
    delete from runs
     where tenant_id = 1 and id = any($1::uuid[]) and state = 'running'
    returning *
)
insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, fence, trigger, priority,
                     failures, losses, max_attempts, scheduled_for, ready_at, started_at, finished_at, worker_id,
                     args, tags, origin_run_id)
select tenant_id, id, attempt, job_id, job_version, true, 'succeeded', 'succeeded', fence, trigger, priority,
       failures, losses, max_attempts, scheduled_for, ready_at, claimed_at, now(), worker_id,
       args, tags, origin_run_id
  from gone

-- :name insert
insert into runs (tenant_id, id, job_id, job_version, lane_id, state, trigger, priority, scheduled_for, ready_at,
                  order_key, max_attempts)
values (1, $1, $2, 1, 1, 'ready', 'api', 500, now(), now(), now(), 4)

-- :name completed
select count(*) from history

-- :name empty
truncate runs, history

-- :name settle
vacuum (analyze) runs
