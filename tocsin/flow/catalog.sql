-- :name columns
select j.tenant_id, j.id::text as id, j.name, j.version, j.state, j.spec, j.created_at, j.updated_at, j.zone_rules,
       t.next_fire_at,
       -- The first waiting occurrence, by the index of occurrences: a job may have a million runs of other kinds.
       (select r.ready_at from runs r
         where r.job_id = j.id and r.tenant_id = j.tenant_id and r.trigger = 'schedule' and r.attempt = 0
           and r.state in ('staged', 'ready', 'waiting')
           and (r.job_id, r.scheduled_for) >= (j.id, '-infinity'::timestamptz)
           and (r.job_id, r.scheduled_for) <= (j.id, 'infinity'::timestamptz)
         order by r.scheduled_for
         limit 1) as ready_at,
       l.run_ids[1]::text as last_run_id, l.states[1] as last_run_state, l.ends[1] as last_run_finished_at,
       l.ended, l.succeeded, l.dead, l.mean_ms, l.longest_ms,
       case when j.joins then (
            select json_agg(json_build_object('job', d.child_id, 'name', c.name, 'on', d.wanted) order by d.child_id)::text
              from (select d.child_id,
                           case d.wants when 's' then 'success' when 'f' then 'failure' else 'completion' end as wanted
                      from dependencies d
                     where (d.parent_id, d.tenant_id) between (j.id, j.tenant_id) and (j.id, j.tenant_id)
                     order by d.child_id
                     limit 100) d
             cross join lateral (
                    select c.name from jobs c where c.tenant_id = j.tenant_id and c.id = d.child_id limit 1) c) end as feeds
  from jobs j
  left join triggers t on t.tenant_id = j.tenant_id and t.job_id = j.id
  left join lateral (
        -- The last runs that ended, the newest first: what a list can afford to look at for each job.
        select array_agg(h.run_id) as run_ids, array_agg(h.state) as states, array_agg(h.finished_at) as ends,
               count(*) as ended,
               count(*) filter (where h.state = 'succeeded') as succeeded,
               count(*) filter (where h.state = 'dead') as dead,
               avg(h.took_ms) as mean_ms, max(h.took_ms) as longest_ms
          from (select h.run_id, h.state, h.finished_at,
                       (extract(epoch from h.finished_at - h.started_at) * 1000)::float8 as took_ms
                  from history h
                 -- The comparison of whole keys makes the index by job cheaper than a scan of all runs of the tenant:
                 -- if nearly all runs belong to one job, the planner may choose the scan. The other two conditions
                 -- exclude partitions: no run is older than its job, except for the order of ids within one instant,
                 -- and no run is from a future day. (The first 48 bits of an id are its instant in milliseconds.)
                 where h.job_id = j.id and h.tenant_id = j.tenant_id and h.final
                   and h.run_id >= (lpad(to_hex(greatest(('x' || translate(left(j.id::text, 13), '-', ''))::bit(48)::bigint
                                                         - 86400000, 0)), 12, '0') || '00000000000000000000')::uuid
                   and h.run_id < (lpad(to_hex((extract(epoch from now() + interval '1 day') * 1000)::bigint), 12, '0')
                                   || '00000000000000000000')::uuid
                   and (h.job_id, h.run_id) >= (j.id, '00000000-0000-0000-0000-000000000000'::uuid)
                   and (h.job_id, h.run_id) <= (j.id, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
                 order by h.run_id desc
                 limit 20) h) l on true

-- :name get
-- :include columns
 where j.tenant_id = $1 and j.id = any($2::uuid[])

-- :name get_named
-- :include columns
 where j.tenant_id = $1 and j.name = $2 and j.state in ('active', 'paused')

-- :name list
-- Jobs of a range of ids, newest first. Sections `only_…` are the conditions of the filters.
-- :include columns
 where j.tenant_id = $tenant and j.node is null and j.id >= $low::uuid and j.id < $high::uuid
   $ONLY
 order by j.id desc
 limit $most

-- :name floor
-- The id behind that many jobs; no row if there are fewer. Run as the engine: for a key of few jobs the policies would
-- discard rows uncounted.
select j.id::text
  from jobs j
 where j.tenant_id = $tenant and j.id >= $low::uuid and j.id < $high::uuid
   $ONLY
 order by j.id desc
offset $window
 limit 1

-- :name only_closed
-- Paused or cancelled: has an index of its own.
and j.node is null and j.state = $state and j.state in ('paused', 'cancelled')
and (j.tenant_id, j.state, j.id) >= ($tenant, $state, $low::uuid)
and (j.tenant_id, j.state, j.id) < ($tenant, $state, $high::uuid)
-- :name only_state
and j.state = $state
-- :name only_pool
and (select l.pool from lanes l where l.id = j.lane_id) = $pool
-- :name only_text
and strpos(lower(coalesce(j.name, '')), lower($text)) > 0
-- :name only_tag
and j.tags @> $tag::jsonb
-- :name only_ids
and j.id = any($ids::uuid[])

-- :name visible
-- For one whose key is kept to some jobs: the policies show it no others.
select j.id::text as id
  from unnest($2::uuid[]) as k(id)
 cross join lateral (select j.id from jobs j where j.tenant_id = $1 and j.id = k.id limit 1) j
