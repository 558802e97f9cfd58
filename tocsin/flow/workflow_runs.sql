-- :name live_head
select r.id, r.job_id, r.job_version, r.state, null::text as reason, r.blocked_by, r.trigger, r.args, r.scheduled_for,
       coalesce(r.logical_at, r.scheduled_for) as logical_at, r.workflow_run_id,
       case when r.state in ('running', 'stopping') then greatest(r.claimed_at, r.ready_at) end as started_at,
       null::timestamptz as finished_at, null::text as error_class, null::text as error
  from runs r

-- :name ended_head
select h.run_id, h.job_id, h.job_version, h.state, h.reason, null, h.trigger, h.args, h.scheduled_for,
       coalesce(h.logical_at, h.scheduled_for), h.workflow_run_id,
       h.started_at, h.finished_at, h.error_class, h.error
  from history h

-- :name whose
-- The workflow run that a run is a head of, or is one of the nodes of; and its workflow.
select coalesce(f.workflow_run_id, f.id)::text as id, coalesce(j.workflow_id, j.id)::text as workflow_id
  from (select r.id, r.job_id, r.workflow_run_id from runs r
         where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
        union all
        select h.run_id, h.job_id, h.workflow_run_id from history h
         where h.tenant_id = $1 and h.run_id = $2 and h.final) f
 cross join lateral (select * from jobs j where j.tenant_id = $1 and j.id = f.job_id limit 1) j
 where j.node is not null and f.workflow_run_id is not null
    or exists (select from jobs n where n.tenant_id = $1 and n.workflow_id = j.id)
 limit 1

-- :name whose_archived
-- The same of a run that is archived: what its job is.
select coalesce(j.workflow_id, j.id)::text as workflow_id
  from jobs j
 where j.tenant_id = $1 and j.id = $2
   and (j.node is not null or exists (select from jobs n where n.tenant_id = $1 and n.workflow_id = j.id))

-- :name names
-- A workflow and its nodes.
select j.id::text as id, j.node, j.name from jobs j where j.tenant_id = $1 and (j.workflow_id = $2 or j.id = $2)

-- :name spec
select j.spec from jobs j where j.tenant_id = $1 and j.id = $2 and j.version = $3
union all
select o.spec::text from job_versions o where o.tenant_id = $1 and o.job_id = $2 and o.version = $3

-- :name in_files
-- All that is archived of a workflow run.
-- :include ended_in_files
 where final and tenant_id = $tenant and (run_id = $run::uuid or workflow_run_id = $run::uuid)

-- :name heads
-- All heads of a workflow run, the first one first.
--   $1 tenant  $2 workflow run  $3 workflow
select f.*, f.id::text as id
  from (
-- :include live_head
 where r.tenant_id = $1 and r.job_id = $3 and r.id = $2
union all
-- :include live_head
 where r.tenant_id = $1 and r.job_id = $3 and r.workflow_run_id = $2 and r.id <> $2
union all
-- :include ended_head
 where h.tenant_id = $1 and h.job_id = $3 and h.run_id = $2 and h.final
union all
-- :include ended_head
 where h.tenant_id = $1 and h.job_id = $3 and h.workflow_run_id = $2 and h.run_id <> $2 and h.final) f
 order by f.id

-- :name node_runs
-- All runs of a workflow run's nodes.
select j.node, j.id::text as job_id, f.id::text as run_id, f.state, f.reason, f.blocked_by, f.attempt, f.started_at,
       f.finished_at, f.error_class, f.error, f.result, f.result_bytes, f.origin_run_id::text as origin_run_id, f.is_element
  from (select r.id, r.job_id, r.state, null::text as reason, r.blocked_by, r.attempt,
               case when r.state in ('running', 'stopping') then greatest(r.claimed_at, r.ready_at) end as started_at,
               null::timestamptz as finished_at, null::text as error_class, null::text as error, null::text as result,
               null::int as result_bytes, r.origin_run_id, r.origin_run_id is not null and r.trigger = 'dependency' as is_element
          from runs r
         where r.tenant_id = $1 and r.workflow_run_id = $2 and r.job_id <> $3
        union all
        select h.run_id, h.job_id, h.state, h.reason, null, h.attempt, h.started_at, h.finished_at, h.error_class,
               h.error, case when b.bytes <= 4096 then h.result end, b.bytes, h.origin_run_id,
               h.origin_run_id is not null and h.trigger = 'dependency'
          from history h
         -- What begins with a space is the reference to one in object storage.
         cross join lateral (
                select case when left(h.result, 1) = ' ' then substring(h.result, '"size":([0-9]+)')::int
                            else octet_length(h.result) end as bytes) b
         where h.tenant_id = $1 and h.workflow_run_id = $2 and h.job_id <> $3 and h.final) f

-- :name nodes
-- The last run of each node.
with every as materialized (
-- :include node_runs
 cross join lateral (select * from jobs j where j.tenant_id = $1 and j.id = f.job_id limit 1) j
 where not f.is_element)
select distinct on (node) * from every order by node, run_id desc

-- :name elements
-- How many runs of mapped nodes are in which state, from when to when they ran, and what they resulted in: how many bytes,
-- with a comma behind each, and the first 4 KiB of it.
with every as materialized (
-- :include node_runs
 cross join lateral (select * from jobs j where j.tenant_id = $1 and j.id = f.job_id limit 1) j
 where f.is_element),
measured as (
    select *, coalesce(result_bytes, 4) + 1 as bytes,
           sum(coalesce(result_bytes, 4) + 1) over (partition by origin_run_id order by run_id) as so_far
      from every
)
select origin_run_id, state, count(*)::int as runs, min(started_at) as started_at, max(finished_at) as finished_at,
       sum(bytes)::bigint as bytes,
       string_agg(coalesce(result, 'null'), ',' order by run_id) filter (where so_far < 4096) as results
  from measured
 group by origin_run_id, state

-- :name list
-- Workflow runs, the newest first: their first heads, each with what became of its last one.
--   $1 tenant  $2 workflows  $3 before  $4 limit
with workflow as materialized (
    select j.id, j.name from jobs j where j.tenant_id = $1 and j.id = any($2::uuid[])
),
first as materialized (
    select f.*
      from workflow w
     cross join lateral (
            select f.id, f.job_id, w.name, f.trigger, f.scheduled_for, f.logical_at, f.started_at
              from (
                    -- By the index of the job's runs: catalog.sql explains why the condition is repeated.
                    (select * from (
-- :include live_head
                     where r.tenant_id = $1 and r.job_id = w.id and r.workflow_run_id is null and r.id < $3::uuid
                       and (r.job_id, r.id) >= (w.id, '00000000-0000-0000-0000-000000000000'::uuid)
                       and (r.job_id, r.id) < (w.id, $3::uuid)
                     order by r.id desc
                     limit $4) live)
                    union all
                    (select * from (
-- :include ended_head
                     where h.tenant_id = $1 and h.job_id = w.id and h.workflow_run_id is null and h.final
                       and h.run_id < $3::uuid
                       and (h.job_id, h.run_id) >= (w.id, '00000000-0000-0000-0000-000000000000'::uuid)
                       and (h.job_id, h.run_id) < (w.id, $3::uuid)
                     order by h.run_id desc
                     limit $4) ended)) f
             order by f.id desc
             limit $4) f
     order by f.id desc
     limit $4
)
select f.id::text as id, f.job_id::text as workflow_id, f.name, f.trigger, f.scheduled_for, f.logical_at, f.started_at,
       l.state, l.reason, l.blocked_by, l.finished_at, l.error_class, l.error, l.job_version, l.retries
  from first f
 cross join lateral (
        select o.*, (count(*) over () - 1)::int as retries
          from (
-- :include live_head
                 where r.tenant_id = $1 and r.job_id = f.job_id and r.id = f.id
                union all
-- :include live_head
                 where r.tenant_id = $1 and r.job_id = f.job_id and r.workflow_run_id = f.id and r.id <> f.id
                union all
-- :include ended_head
                 where h.tenant_id = $1 and h.job_id = f.job_id and h.run_id = f.id and h.final
                union all
-- :include ended_head
                 where h.tenant_id = $1 and h.job_id = f.job_id and h.workflow_run_id = f.id and h.run_id <> f.id
                   and h.final) o
         -- A second head, which was skipped because there was one, is none.
         where o.state <> 'skipped' or o.workflow_run_id is null
         order by o.finished_at is null desc, o.id desc
         limit 1) l
 order by f.id desc

-- :name now
select now()
