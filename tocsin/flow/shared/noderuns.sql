-- :name nodes
select j.node, j.id::text as id, j.key_template from jobs j where j.tenant_id = $1 and j.workflow_id = $2

-- :name ends
-- How each node's last run in a workflow run ended. Those of a mapped node's elements name the run that they are of.
select distinct on (j.node) j.node, h.run_id::text as run_id, h.state, h.reason
  from history h
 cross join lateral (select * from jobs j where j.tenant_id = h.tenant_id and j.id = h.job_id limit 1) j
 where h.tenant_id = $1 and h.workflow_run_id = $2 and h.final and j.node is not null
   and (h.origin_run_id is null or h.trigger = 'retry')
 order by j.node, h.run_id desc

-- :name part
-- Of what lives in a workflow run: all but its head ($3), or just one ($4) and, if that is mapped, its elements.
r.tenant_id = $1 and r.workflow_run_id = $2 and r.id is distinct from $3::uuid
and ($4::uuid is null or r.id = $4 or r.origin_run_id = $4 and r.trigger = 'dependency')

-- :name hold
-- Elements first: whoever ends one takes it before the run that it is one of.
select r.id from runs r
 where
-- :include part
 order by r.origin_run_id is not null and r.trigger = 'dependency' desc, r.id
   for update

-- :name stop
-- staged | ready | waiting → cancelled, running → stopping, after `hold`. A mapped node's run, whose elements run, is not
-- ended before they are: it keeps the reason, and the end of the last of them ends it.
--   $5 the reason
with locked as materialized (
    select r.ctid as place, r.state, r.map = '{}' as mapped
      from runs r
     where
-- :include part
     order by r.id
),
stopping as (
    update runs r
       set state = 'stopping', stop_reason = $5
      from locked l
     where l.state = 'running' and r.ctid = l.place
    returning r.id, r.worker_id, r.fence, r.state
),
marked as (
    update runs r
       set stop_reason = $5
      from locked l
     where l.mapped and r.ctid = l.place and r.stop_reason is null
),
ended as (
    delete from runs r
     using locked l
     where l.state in ('staged', 'ready', 'waiting') and l.mapped is not true and r.ctid = l.place
    returning r.*, 'cancelled' as final_state, 'cancelled' as reason, null::text as error
),
-- :include record_ended
select id::text as id, 'cancelled' as state, null::text as worker_id, fence, limited, overlap,
-- :include family
  from ended
union all
select s.id::text, s.state, s.worker_id::text, s.fence, false, null, null
  from stopping s

-- :name lock_head
-- A workflow run that lives, with the graph that it began with.
select r.state, r.pending_parents, r.args, r.priority, r.trigger, r.scheduled_for, r.job_id::text as job_id,
       coalesce(r.logical_at, r.scheduled_for) as logical_at, coalesce(r.workflow_run_id, r.id)::text as workflow_run_id,
       s.spec, w.priority as usual_priority, statement_timestamp() as now
  from (select * from runs r
         where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
           for update) r
 cross join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1) w
 cross join lateral (
        select w.spec where w.version = r.job_version
        union all
        select v.spec::text from job_versions v
         where v.tenant_id = w.tenant_id and v.job_id = w.id and v.version = r.job_version
         limit 1) s

-- :name living
-- The runs of nodes that live in a workflow run; `undecided`: they wait for parents. A mapped node's elements are its own.
select j.node, r.id::text as id, r.state = 'waiting' and r.pending_parents > 0 and r.map is distinct from '{}' as undecided
  from runs r
 cross join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1) j
 where r.tenant_id = $1 and r.workflow_run_id = $2 and j.node is not null
   and (r.origin_run_id is null or r.trigger = 'retry')

-- :name rejoin
-- Runs that wait, and wait for others instead of some that had ended; they are held already.
update runs r
   set pending_parents = r.pending_parents + n.added, doomed = n.doomed, parents = n.parents::uuid[], map = n.map
  from unnest($1::int[], $2::uuid[], $3::int[], $4::smallint[], $5::text[], $6::text[])
       as n(tenant_id, id, added, doomed, parents, map)
 where (r.tenant_id, r.id) between (n.tenant_id, n.id) and (n.tenant_id, n.id)

-- :name feed
-- Runs that live, and that others are to wait for from now on; they are held already.
update runs r
   set feeds = r.feeds || n.feeds::uuid[], feeds_on = r.feeds_on || n.feeds_on
  from unnest($1::int[], $2::uuid[], $3::text[], $4::text[]) as n(tenant_id, id, feeds, feeds_on)
 where (r.tenant_id, r.id) between (n.tenant_id, n.id) and (n.tenant_id, n.id)

-- :name grown
-- It waits for so many more, and what has ended and is not run again means this for its end.
update runs r
   set pending_parents = r.pending_parents + $3, doomed = $4
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
