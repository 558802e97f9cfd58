-- How rows are found in all the hot statements: from what is asked for, one index look-up each, in a LATERAL with a
-- LIMIT; and written by their place (ctid), which the same statement has locked. Written as plain joins the planner may
-- turn them round and read the whole table once per batch, whenever its statistics believe the table to be empty, and a
-- queue's statistics often do. A row that moved between snapshot and lock is not found at its place and is left alone:
-- each statement says what becomes of it then.
-- A run's key is compared as a pair, `(tenant_id, id) between x and x`: that only an index led by the pair can answer.
-- Written as two equalities, an index that merely holds the id behind something else (runs_job) costs the same to a
-- planner that believes the table to be empty, and is then read from end to end for every run.

-- :name unjudged
-- For `r`: the sweep decides whether an occurrence this late is a misfire, unless a living worker vouches for its lane.
-- (`coalesce` keeps the planner from the wider index on occurrences.)
coalesce(r.trigger, '') = 'schedule' and r.attempt = 0 and r.ready_at < now() - interval '60 seconds' and not (
    exists (select from lane_vouchers v join workers w on w.id = v.worker_id
             where v.lane_id = r.lane_id and w.state <> 'gone' and w.lease_until > now()
               and w.registered_at <= r.ready_at + interval '60 seconds')
    and not exists (select from tenants t where t.id = r.tenant_id and (r.ready_at >= t.suspended_at
                     or r.ready_at >= t.suspended_from and r.ready_at < t.suspended_until - interval '60 seconds'))
    and not exists (select from lanes l join pools p on p.name = l.pool where l.id = r.lane_id and (r.ready_at >= p.paused_at
                     or r.ready_at >= p.paused_from and r.ready_at < p.paused_until - interval '60 seconds')))

-- :name lock_jobs
-- Lock order everywhere: jobs, triggers, limits by key, runs by id. The keys come in order.
select j.tenant_id, j.id
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (
        select * from jobs j where j.tenant_id = k.tenant_id and j.id = k.id limit 1 for no key update) j

-- :name lock_limits
select l.tenant_id, l.key
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, key)
 cross join lateral (
        select * from limits l where l.tenant_id = k.tenant_id and l.key = k.key limit 1 for no key update) l

-- :name stage
-- → staged | ready, or waiting for other runs. The one statement that makes a run. ready_at is never in the past. Runs
-- made together stand in the order in which they were asked for, a microsecond apart: a claim can then begin exactly where
-- live ones begin. A workflow that has begun goes on, whatever became of its jobs.
with made as (
    insert into runs (tenant_id, id, job_id, job_version, lane_id, state, trigger, priority, scheduled_for, ready_at,
                      order_key, deadline_at, max_attempts, overlap, limited, once, args, tags, origin_run_id, key_id,
                      circuit_id, needs, joins, logical_at, workflow_run_id, pending_parents, doomed, feeds, feeds_on,
                      parents, map, join_key, chain, blocked_by, backfill_id)
    select j.tenant_id, n.id, j.id, j.version, j.lane_id,
           case when n.pending > 0 then 'waiting' when t.ready_at > now() then 'staged' else 'ready' end,
           n.trigger, t.priority, t.scheduled_for, t.ready_at,
           t.ready_at - (t.priority - 500) * p.head_start + (n.place - 1) * interval '1 microsecond',
           -- What waits for other runs becomes due when it is released; for a past that is filled it is never too late.
           case when n.pending > 0 or n.backfill_id is not null then null else t.ready_at + j.start_deadline end,
           j.max_attempts, j.overlap,
           j.max_concurrency is not null or j.key_id is not null or j.rate_gap is not null,
           j.once and n.trigger = 'schedule',
           n.args, j.tags, n.origin_run_id, coalesce(n.key_id, j.key_id), j.circuit_id,
           -- Few jobs need more than a slot, and only their documents are read.
           case when l.needs <> '{}' then array[
                ceil((j.spec::json #>> '{resources,cpu}')::numeric * 1000)::int,
                (j.spec::json #>> '{resources,memory_mb}')::int, (j.spec::json #>> '{resources,disk_mb}')::int,
                (j.spec::json #>> '{resources,gpus}')::int] end,
           j.joins, n.logical_at, n.workflow_run_id, n.pending, coalesce(n.doomed, 0), n.feeds::uuid[], n.feeds_on,
           n.parents::uuid[], n.map, n.join_key, n.chain, case when n.pending > 0 then 'parent' end, n.backfill_id
      from unnest($1::int[], $2::uuid[], $3::uuid[], $4::text[], $5::timestamptz[], $6::int[], $7::text[], $8::uuid[],
                  $9::timestamptz[], $10::uuid[], $11::timestamptz[], $12::uuid[], $13::int[], $14::smallint[],
                  $15::text[], $16::text[], $17::text[], $18::text[], $19::uuid[], $20::uuid[], $21::uuid[])
           with ordinality as n(tenant_id, id, job_id, trigger, scheduled_for, priority, args, origin_run_id, ready_at,
                                key_id, logical_at, workflow_run_id, pending, doomed, feeds, feeds_on, parents, map,
                                join_key, chain, backfill_id, place)
     cross join lateral (select * from jobs j where j.tenant_id = n.tenant_id and j.id = n.job_id limit 1) j
      join lanes l on l.id = j.lane_id
      join pools p on p.name = l.pool
     cross join lateral (
            select coalesce(n.scheduled_for, now()) as scheduled_for, greatest(n.scheduled_for, n.ready_at, now()) as ready_at,
                   coalesce(n.priority, j.priority) as priority) t
     where j.state in ('active', 'paused') or n.workflow_run_id is not null
        or (j.state = 'completed' and n.trigger in ('retry', 'redrive'))
        on conflict do nothing
    returning tenant_id, id, job_id, lane_id, state, ready_at, order_key, key_id
),
keys as (
    select m.tenant_id, m.key_id, max(j.key_max) as max
      from made m
     cross join lateral (select j.key_max from jobs j where j.tenant_id = m.tenant_id and j.id = m.job_id limit 1) j
     where m.key_id is not null
     group by m.tenant_id, m.key_id
     order by m.tenant_id, m.key_id
),
keyed as (
    -- A claim leaves out a limit that somebody holds, so one that is there already is not touched.
    insert into limits (tenant_id, key, max) select tenant_id, key_id, max from keys on conflict do nothing
),
rebound as (
    update limits l
       set max = k.max
      from keys k
     cross join lateral (
            select f.ctid as place, f.max from limits f where f.tenant_id = k.tenant_id and f.key = k.key_id limit 1) f
     where f.max <> k.max and l.ctid = f.place
)
select tenant_id, id::text as id, lane_id, state, ready_at, order_key from made

-- :name retract
-- Occurrences that no worker holds are un-made, under the trigger's lock; their instants, in order.
with gone as (
    delete from runs r
     where r.tenant_id = $1 and r.job_id = $2 and r.trigger = 'schedule' and r.attempt = 0
       and r.state in ('staged', 'ready', 'waiting')
    returning r.scheduled_for
),
given_back as (
    update run_counts c
       set used = c.used - (select count(*) from gone)
     where c.tenant_id = $1 and c.job_id = $2
)
select coalesce(array_agg(scheduled_for order by scheduled_for), '{}') as instants from gone

-- :name passed
-- Now (read after the locks, which may have taken their time), and up to when a job's occurrences are due or, though
-- they are not, were claimed or have ended; after `retract` all that are left are held or were. $3: the lowest id of now,
-- for one that was staged ahead and has ended has an id of its instant.
select statement_timestamp() as now,
       greatest(statement_timestamp(),
                (select max(r.scheduled_for) from runs r
                  where r.tenant_id = $1 and r.job_id = $2 and r.trigger = 'schedule'),
                (select max(h.scheduled_for) from history h
                  where h.tenant_id = $1 and h.job_id = $2 and h.run_id >= $3 and h.trigger = 'schedule' and h.final))
           as after

-- :name note_missed
-- Occurrences that get no run: one counted row with the reason, never silence.
insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, reason, count, fence, trigger,
                     priority, failures, losses, max_attempts, first_for, scheduled_for, ready_at, finished_at, tags)
select j.tenant_id, m.id, 1, j.id, j.version, true, 'skipped', m.reason, m.count, 0, 'schedule',
       j.priority, 0, 0, j.max_attempts, m.first, m.last, m.last, now(), j.tags
  from unnest($1::int[], $2::uuid[], $3::uuid[], $4::text[], $5::int[], $6::timestamptz[], $7::timestamptz[])
       as m(tenant_id, id, job_id, reason, count, first, last)
 cross join lateral (select * from jobs j where j.tenant_id = m.tenant_id and j.id = m.job_id limit 1) j

-- :name complete_jobs
-- active | paused → completed, for one-time jobs whose run is among `ended`. The jobs are locked already. The hold of a
-- paused job is removed: a completed job cannot be resumed, and a retry of its run must run. The hold of a job that is
-- cancelled in pieces stays until its last piece.
completed as (
    update jobs j
       set state = 'completed', ended_at = now(), updated_at = now()
      from ended e
     cross join lateral (
            select f.ctid as place, f.state from jobs f where f.tenant_id = e.tenant_id and f.id = e.job_id limit 1) f
     where e.once and f.state in ('active', 'paused') and j.ctid = f.place
),
unheld as (
    delete from holds h
     using ended e
     cross join lateral (
            select f.ctid as place from holds f where f.tenant_id = e.tenant_id and f.job_id = e.job_id limit 1) f
     where e.once and h.ctid = f.place
       and not exists (select from cancels c where c.tenant_id = e.tenant_id and c.job_id = e.job_id)
)

-- :name record_ended
-- For `ended`: deleted rows of runs, with final_state, reason and, if that is an error, its message. They had no attempt of
-- their own.
recorded as (
    insert into history (tenant_id, run_id, attempt, job_id, job_version, final, state, reason, fence, trigger,
                         priority, failures, losses, max_attempts, scheduled_for, ready_at, finished_at,
                         error_class, error, args, tags, origin_run_id, logical_at, workflow_run_id)
    select tenant_id, id, attempt + 1, job_id, job_version, true, final_state, reason, fence, trigger,
           priority, failures, losses, max_attempts, scheduled_for, ready_at, now(),
           case when error is not null then reason end, error, args, tags, origin_run_id, logical_at, workflow_run_id
      from ended
),
filled as (
    insert into backfill_ends (tenant_id, backfill_id, run_id, logical_at, state)
    select tenant_id, backfill_id, id, logical_at, final_state from ended where backfill_id is not null
),
unjoined as (
    -- Parents of it that are still to end must not make it anew.
    insert into ended_joins (tenant_id, job_id, join_key, run_id, chain, logical_at)
    select tenant_id, job_id, join_key, id, chain, logical_at
      from ended
     where state = 'waiting' and join_key is not null and pending_parents > 0
        on conflict do nothing
),
given_back as (
    -- An occurrence that was never claimed is not one of its schedule's `max_runs`.
    insert into unclaimed (tenant_id, job_id)
    select e.tenant_id, e.job_id
      from ended e
     cross join lateral (
            select from run_counts c where c.tenant_id = e.tenant_id and c.job_id = e.job_id limit 1) c
     where e.attempt = 0 and e.trigger = 'schedule'
),
-- :include complete_jobs

-- :name ended_with
-- What a run that has ended (`h`) resulted in; of a node that was run once for each element, the list of what these did.
                case when h.reason = 'mapped' then (
                     select '[' || coalesce(string_agg(coalesce(m.result, 'null'), ',' order by m.run_id), '') || ']'
                       from history m
                      where m.tenant_id = h.tenant_id and m.workflow_run_id = h.workflow_run_id
                        and m.job_id = h.job_id and m.origin_run_id = h.run_id and m.final)
                     else h.result end

-- :name family
-- Of a run that has ended: what decides about those that wait for it, as one text, and null for nearly all.
       case when feeds is not null or joins then json_build_object(
            'tenant_id', tenant_id, 'id', id, 'job_id', job_id, 'state', final_state, 'reason', reason,
            'feeds', feeds, 'feeds_on', feeds_on, 'joins', joins, 'trigger', trigger, 'join_key', join_key, 'chain', chain,
            'logical_at', coalesce(logical_at, scheduled_for) at time zone 'UTC')::text end as family

-- :name end_unheld
-- staged | ready | waiting → $3 (cancelled, expired, skipped). Their jobs are locked already if they are one-time.
-- The ids come in order. A row that moves meanwhile is ended by the next sweep, if it is still to be ended.
with locked as materialized (
    select r.ctid as place
      from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
     cross join lateral (
            select r.ctid from runs r
             where (r.tenant_id, r.id) between (k.tenant_id, k.id) and (k.tenant_id, k.id)
               and r.state in ('staged', 'ready', 'waiting')
             limit 1
               for update) r
),
ended as (
    delete from runs r
     using locked l
     where r.ctid = l.place
    returning r.*, $3::text as final_state, $4::text as reason, null::text as error
),
-- :include record_ended
select tenant_id, id::text as id, job_id::text as job_id, key_id::text as key_id, limited, overlap,
-- :include family
  from ended

-- :name hold_runs
-- Take the runs that are to be cancelled, so that the statement after it sees what each of them is by now.
select r.id from runs r
 where r.tenant_id = $1 and r.job_id = $2 and ($3::uuid is null or r.id = $3)
   and ($4::uuid is null or r.id < $4 and r.trigger <> 'backfill'
                            and (r.trigger = 'schedule' or r.state in ('running', 'stopping')))
   and ($5::uuid is null or r.backfill_id = $5)
   and r.id > $6::uuid and r.id <= $7::uuid
 order by r.id
   for update

-- :name cancel_runs
-- staged | ready | waiting → cancelled, running → stopping: over all live states in one statement, after `hold_runs`.
-- $3 one run, or null for all; $4 those before a run that replaces them, or null (what somebody asked for and has not
-- begun is not replaced: it is never skipped); $5: whether running runs are stopped; $6 the reason; $7: runs of this
-- backfill; $8 and $9: runs after the first id and up to the second.
with locked as materialized (
    select r.ctid as place, r.state
      from runs r
     where r.tenant_id = $1 and r.job_id = $2 and ($3::uuid is null or r.id = $3)
       and ($4::uuid is null or r.id < $4 and r.trigger <> 'backfill'
                                and (r.trigger = 'schedule' or r.state in ('running', 'stopping')))
       and ($7::uuid is null or r.backfill_id = $7)
       and r.id > $8::uuid and r.id <= $9::uuid
     order by r.id
),
stopping as (
    -- What is left running gets no further attempt either: its reason to stop stands, its state does not change.
    update runs r
       set state = case when $5 then 'stopping' else 'running' end, stop_reason = $6
      from locked l
     where l.state = 'running' and r.ctid = l.place
    returning r.id, r.worker_id, r.fence, r.state
),
ended as (
    delete from runs r
     using locked l
     where l.state in ('staged', 'ready', 'waiting') and r.ctid = l.place
    returning r.*, case when $4::uuid is null then 'cancelled' else 'skipped' end as final_state,
              case when $4::uuid is null then 'cancelled' else 'coalesced' end as reason, null::text as error
),
-- :include record_ended
select id::text as id, 'cancelled' as state, null::text as worker_id, fence, limited, overlap, key_id::text as key_id,
-- :include family
  from ended
union all
select s.id::text, s.state, s.worker_id::text, s.fence, false, null, null, null
  from stopping s

-- :name room
-- For `release` and `release_in`: how many more runs each limit allows. The rows of the limits are locked already.
with recursive freed as (
    select distinct f.tenant_id, f.key, l.max, l.tat
      from unnest($1::int[], $2::uuid[]) as f(tenant_id, key)
      left join lateral (
            select l.max, l.tat from limits l where l.tenant_id = f.tenant_id and l.key = f.key limit 1) l on true
),
room as materialized (
    select f.tenant_id, f.key, f.tat,
           case when f.max is null then 1000000
                else f.max - (select count(*) from runs b
                               where b.job_id = f.key and b.limited and b.state in ('running', 'stopping'))
                           - (select count(*) from runs b
                               where b.key_id = f.key and b.state in ('running', 'stopping')) end as free
      from freed f
),

-- :name rate_room
-- For `f`, a limit: how many runs its rate allows now. A rate that an edit removed blocks no run.
            select coalesce(floor(j.rate_burst
                                  - greatest(extract(epoch from f.tat - now()), 0) / extract(epoch from j.rate_gap)
                                  + 1e-9), 1000) as free

-- :name let_go
-- waiting → ready, for `chosen`. A run that waited for a limit keeps the limit's key (`blocked_key`) until it starts or
-- waits again: until it has started, no other run is released in its place.
locked as materialized (
    select r.ctid as place, r.blocked_by in ('limit', 'rate') as counts
      from (select * from chosen order by id) c
     cross join lateral (
            select r.ctid, r.state, r.blocked_by from runs r
             where (r.tenant_id, r.id) between (c.tenant_id, c.id) and (c.tenant_id, c.id)
             limit 1
               for update) r
     where r.state = 'waiting'
)
update runs r
   set state = 'ready', blocked_by = null, blocked_key = case when l.counts then r.blocked_key end
  from locked l
 where r.ctid = l.place
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name unblocked
-- The first live run of each job by id, if it waits for an earlier run: none exists any more. The condition is the same
-- as in the claim, so that the claim does not park the run again.
    select r.tenant_id, r.id
      from freed f
     cross join lateral (
            select from runs w
             where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'overlap'
             limit 1) w
     cross join lateral (
            select e.tenant_id, e.id, e.blocked_by
              from runs e
             where e.job_id = f.key and e.trigger <> 'backfill'
               and (e.state in ('ready', 'waiting', 'running', 'stopping')
                    or e.state = 'staged' and (e.ready_at <= now() or e.attempt > 0))
             order by e.id
             limit 1) r
     where r.blocked_by = 'overlap'

-- :name release
-- waiting → ready: for each limit (of a job or a key) as many runs as it has room for and its rate allows, less those
-- that were released and have not started; and the first run of a job if it waited for an earlier one. The sweep
-- releases runs that this misses.
-- :include room
counted as materialized (
    select f.*, (select count(*) from runs q where q.state = 'ready' and q.blocked_key = f.key) as let_go
      from room f
),
chosen as materialized (
    select r.tenant_id, r.id
      from counted f
     cross join lateral (
            select w.tenant_id, w.id
              from runs w
             where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'limit'
             order by w.order_key, w.id
             limit least(greatest(f.free - f.let_go, 0), 1000)) r
    union
    select r.tenant_id, r.id
      from counted f
     cross join lateral (
-- :include rate_room
              from (select w.job_id from runs w
                     where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'rate'
                     order by w.order_key limit 1) w
             cross join lateral (
                    select * from jobs j where j.tenant_id = f.tenant_id and j.id = w.job_id limit 1) j) rate
     cross join lateral (
            select w.tenant_id, w.id
              from runs w
             where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'rate'
             order by w.order_key, w.id
             limit least(greatest(rate.free - f.let_go, 0), 1000)) r
    union
-- :include unblocked
),
-- :include let_go

-- :name release_in
-- Like `release`, for lanes ($3) with free workers: runs released in other lanes, where no worker is free to take them,
-- do not count against these lanes.
-- :include room
kinds as (
    select f.*, k.blocked_by from room f cross join (values ('limit'), ('rate')) as k(blocked_by)
),
lanes_of as (
    select k.*, w.lane_id
      from kinds k
     cross join lateral (
            select w.lane_id from runs w
             where w.state = 'waiting' and w.blocked_key = k.key and w.blocked_by = k.blocked_by
               and w.blocked_by in ('limit', 'rate')
             order by w.lane_id
             limit 1) w
    union all
    select p.tenant_id, p.key, p.tat, p.free, p.blocked_by, w.lane_id
      from lanes_of p
     cross join lateral (
            select w.lane_id from runs w
             where w.state = 'waiting' and w.blocked_key = p.key and w.blocked_by = p.blocked_by
               and w.blocked_by in ('limit', 'rate') and w.lane_id > p.lane_id
             order by w.lane_id
             limit 1) w
),
counted as materialized (
    select f.*, (select count(*) from runs q
                  where q.state = 'ready' and q.blocked_key = f.key and q.lane_id = f.lane_id) as let_go
      from lanes_of f
     where f.lane_id = any ($3::int[])
),
chosen as materialized (
    select r.tenant_id, r.id
      from counted f
     cross join lateral (
            select w.tenant_id, w.id
              from runs w
             where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'limit' and w.lane_id = f.lane_id
             order by w.order_key
             limit least(greatest(f.free - f.let_go, 0), 1000)) r
     where f.blocked_by = 'limit'
    union
    select r.tenant_id, r.id
      from counted f
     cross join lateral (
-- :include rate_room
              from (select w.job_id from runs w
                     where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'rate'
                       and w.lane_id = f.lane_id
                     order by w.order_key limit 1) w
             cross join lateral (
                    select * from jobs j where j.tenant_id = f.tenant_id and j.id = w.job_id limit 1) j) rate
     cross join lateral (
            select w.tenant_id, w.id
              from runs w
             where w.state = 'waiting' and w.blocked_key = f.key and w.blocked_by = 'rate' and w.lane_id = f.lane_id
             order by w.order_key
             limit least(greatest(rate.free - f.let_go, 0), 1000)) r
     where f.blocked_by = 'rate'
    union
-- :include unblocked
),
-- :include let_go
