-- :name keep
-- What attempts say of themselves. Of a run that is not the worker's under this fence nothing is kept, and it is not
-- answered. The arrays come in the order of ids, and so do the locks.
--   $1 worker  $2 runs  $3 fences  $4 progress or null  $5 checkpoints as JSON, or null
with held as materialized (
    select r.tenant_id, r.id, t.progress, t.checkpoint
      from unnest($2::uuid[], $3::bigint[], $4::float8[], $5::text[]) as t(id, fence, progress, checkpoint)
     cross join lateral (
            select r.tenant_id, r.id from runs r
             where (r.worker_id, r.id) between ($1::uuid, t.id) and ($1::uuid, t.id)
               and r.state in ('running', 'stopping')
               and r.fence = t.fence
             limit 1
               for update) r
)
-- By key and not by place, for a cancel may have moved the row before it was locked.
update runs r
   set progress = coalesce(h.progress, r.progress), checkpoint = coalesce(h.checkpoint, r.checkpoint)
  from held h
 where (r.tenant_id, r.id) between (h.tenant_id, h.id) and (h.tenant_id, h.id)
returning r.id::text as id, r.fence

-- :name whose
-- Of runs that a worker holds: whose they are, and what tells whether they know something in confidence.
select r.tenant_id, r.id::text as id, r.job_id::text as job_id, r.job_version,
       case when left(r.args, 1) = '"' then r.args end as packed
  from unnest($2::uuid[]) as t(id)
 cross join lateral (
        select r.tenant_id, r.id, r.job_id, r.job_version, r.args from runs r
         where (r.worker_id, r.id) between ($1::uuid, t.id) and ($1::uuid, t.id)
           and r.state in ('running', 'stopping')
         limit 1) r
