-- :name used
-- How many open jobs and how many runs that have not started a tenant has, each counted up to a limit.
--   $1 tenant  $2 jobs at most  $3 runs at most
select (select count(*)
          from (select from jobs j where j.tenant_id = $1 and j.state in ('active', 'paused') limit $2) j)::int as jobs,
       (select count(*)
          from (select from runs r
                 where r.tenant_id = $1 and r.state in ('staged', 'ready', 'waiting') limit $3) r)::int as queued

-- :name nodes
-- How many nodes the workflow has that this is, or that this is a run of; a run of one of the nodes may be the first of all.
--   $1 tenant  $2 a job, or a run that has ended
select count(*)
  from jobs n
 where n.tenant_id = $1
   and n.workflow_id = (select coalesce(j.workflow_id, j.id) from jobs j
                         where j.tenant_id = $1
                           and j.id = coalesce((select h.job_id from history h
                                                 where h.tenant_id = $1 and h.run_id = $2 and h.final limit 1), $2)
                         limit 1)

-- :name known
select true from idempotency where tenant_id = $1 and key = $2
