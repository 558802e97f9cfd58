-- :name raise_epoch
-- At least the day's number, so that the epoch is above whatever the database that was lost had handed out after the
-- backup, through however many fail-overs; days, because up to 8191 a fence is a whole number in every language's JSON.
update cluster
   set restored = greatest(restored + 1, current_date - date '2026-01-01')
returning restored + ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int as epoch

-- :name dismiss
-- live | draining → gone: what they hold of a later past is not ours.
update workers set state = 'gone', gone_at = now() where state <> 'gone' and id <> '00000000-0000-7000-8000-000000000001'
returning id

-- :name take_back
-- running → ready | staged: nobody knows how it went on, and nobody is to blame, so the attempt is told as lost but
-- counts for nothing. What was to be stopped has no worker any more, and the reaper ends it. Workflow runs are held by
-- nobody, and go on with what their nodes are.
with held as materialized (
    select r.ctid as place, r.* from runs r where r.state = 'running' and r.worker_id <> '00000000-0000-7000-8000-000000000001' for update
),
back as (
    update runs r
       set state = case when r.ready_at > now() then 'staged' else 'ready' end, worker_id = null, claim_id = null
      from held h
     where r.ctid = h.place
    returning r.id, r.state
),
recorded as (
    insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, outcome, fence, trigger,
                         priority, failures, losses, max_attempts, scheduled_for, ready_at, started_at, finished_at,
                         worker_id, error_class, error, args, tags, origin_run_id)
    select h.tenant_id, h.id, h.attempt, h.job_id, h.job_version, false, b.state, 'lost', h.fence, h.trigger,
           h.priority, h.failures, h.losses, h.max_attempts, h.scheduled_for, h.ready_at,
           least(now(), greatest(h.ready_at, h.claimed_at)), now(),
           h.worker_id, 'restored', 'the database was restored from a backup made while this attempt ran',
           h.args, h.tags, h.origin_run_id
      from held h
      join back b on b.id = h.id
)
select id from back

-- :name stamp_lanes
-- A backup may come from a database with higher transaction numbers: servers would read all lanes again and again.
update lanes set retired_at = retired_at

-- :name note
insert into audit (tenant_id, actor, action, target, detail)
select t.id, 'tocsin restored', 'cluster.restored', 'cluster', jsonb_build_object('epoch', $1::int)
  from tenants t
 where t.slug = 'default'

-- :name living
-- Servers that have written since the backup was restored: they began before this.
select name from servers where seen_at > now() - interval '15 seconds' order by name
