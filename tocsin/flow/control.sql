-- :name lock_job
select state, once, version, name, schedule, node,
       exists (select from jobs n where n.tenant_id = $1 and n.workflow_id = jobs.id) as has_nodes,
       coalesce(anchored_at, created_at) as anchor, now() as now
  from jobs
 where tenant_id = $1 and id = $2
   for no key update

-- :name set_state
update jobs
   set state = $3, updated_at = now(), ended_at = case when $3 in ('cancelled', 'completed') then now() end
 where tenant_id = $1 and id = $2 and state in ('active', 'paused')

-- :name hold
insert into holds (tenant_id, job_id) values ($1, $2) on conflict do nothing

-- :name last_of_piece
-- The last of the next $4 runs of a job after $3; no row if there are fewer.
select r.id::text from runs r where r.tenant_id = $1 and r.job_id = $2 and r.id > $3::uuid order by r.id offset $4 - 1 limit 1

-- :name cancel_later
-- Record that runs of a cancelled job remain. The job's hold keeps workers from them until they are cancelled.
insert into cancels (tenant_id, job_id, reason, stop_running, done_to) values ($1, $2, $3, $4, $5)
    on conflict do nothing

-- :name any_cancel
select exists (select from cancels)

-- :name next_cancel
-- The cancelled job that is next in turn. A job that another server continues is left out.
select c.tenant_id, c.job_id::text as job_id, c.reason, c.stop_running, c.done_to::text as done_to
  from cancels c
 order by c.turn_at, c.job_id
 limit 1
   for update skip locked

-- :name cancelled_to
update cancels set done_to = $3, turn_at = now() where tenant_id = $1 and job_id = $2

-- :name cancelled_all
delete from cancels where tenant_id = $1 and job_id = $2

-- :name unhold
delete from holds where tenant_id = $1 and job_id = $2

-- :name leave_parents
-- An ended job waits for nobody. Those that wait for it do so in vain, and their explanations say so.
delete from dependencies d where (d.child_id, d.tenant_id) between ($2::uuid, $1::int) and ($2::uuid, $1::int)

-- :name end_backfills
-- What it owed of the past is owed no more.
update backfills
   set state = 'cancelled', finished_at = now()
 where tenant_id = $1 and job_id = $2 and state in ('running', 'paused')

-- :name waiting_paused
-- waiting → ready: runs asked for by hand while the job was paused. The rest follow by the sweep.
with chosen as materialized (
    select r.ctid as place
      from runs r
     where r.tenant_id = $1 and r.state = 'waiting' and r.blocked_key = $2 and r.blocked_by = 'paused'
     order by r.order_key
     limit 1000
       for update
)
update runs r
   set state = 'ready', blocked_by = null, blocked_key = null
  from chosen c
 where r.ctid = c.place
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name run_job
-- Which job a live run belongs to; `maps`: it is that of a mapped node; `stops`: it was told to stop, which one that its
-- elements run for shows by the reason alone.
select job_id::text as job_id, key_id::text as key_id, workflow_run_id::text as workflow_run_id, map is not null as maps,
       state = 'stopping' or map = '{}' and stop_reason is not null as stops
  from runs
 where (tenant_id, id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)

-- :name run_ended
select state from history where tenant_id = $1 and run_id = $2 and final
