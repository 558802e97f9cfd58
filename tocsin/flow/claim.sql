-- :name slots
-- For `take` and `take_limited`: the fence to hand out, and the free slots there are.
with fence as (
    select (((('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint + c.restored) << 40)) as base,
           nextval('claim_ids') as claim_id
      from cluster c
),
living as materialized (
    -- The slots of workers whose lease holds: a poll may outlive its worker. A paused pool has none.
    select array_agg(s.slot::int order by s.slot) as slots
      from (select array_agg(w.lives order by k.n) as lives
              from unnest($1::uuid[]) with ordinality as k(id, n)
              left join lateral (
                    select true as lives from workers w
                     where w.id = k.id and w.state <> 'gone' and w.lease_until > now()
                       and not exists (select from pools p where p.name = w.pool and p.paused_at is not null)
                     limit 1) w on true) l
     cross join unnest($2::int[]) with ordinality as s(worker, slot)
     where l.lives[s.worker]
),

-- :name open_share
-- For `want`: nothing of a tenant that is suspended, or to which the lane's pool is closed.
           case when w.tenant_id = any (array(select id from tenants where suspended_at is not null)) then 0
                when w.lane_id = any (array(select l.id from pools p join lanes l on l.pool = p.name
                                             where p.tenants is not null))
                     and exists (select from lanes l join pools p on p.name = l.pool
                                  where l.id = w.lane_id and w.tenant_id <> all (p.tenants)) then 0
                else w.share end as share,

-- :name start
-- For `going`: the places of the rows that start, each with its rank among them.
    update runs r
       set state = 'running', attempt = r.attempt + 1, fence = greatest(r.fence, f.base) + 1, claim_id = f.claim_id,
           worker_id = ($1::uuid[])[($2::int[])[(select slots from living)[g.rank]]], claimed_at = now(),
           progress = null, blocked_key = null
      from going g, fence f
     where r.ctid = g.place and g.rank <= (select cardinality(slots) from living)
    returning r.tenant_id, r.id, r.job_id, r.job_version, r.attempt, r.fence, r.claim_id, r.scheduled_for, r.ready_at,
              r.order_key, r.claimed_at, r.args, r.checkpoint, r.lane_id, r.once, r.overlap, r.circuit_id,
              r.logical_at, r.workflow_run_id, r.parents is not null as has_parents,
              r.feeds is not null or r.joins or r.backfill_id is not null as awaited, (select slots from living)[g.rank] as slot

-- :name take
-- ready | staged (due) → running, for each (lane, tenant) up to its share, in order; what must not run now is parked
-- (→ waiting) or ended (→ skipped, expired). Rows under an exact limit, or with needs of their own, are only named:
-- they need the lock of the limit, or of a worker, first. So do suspects: runs whose worker was lost with them, for the
-- first seconds in which they can run again. A worker gets one suspect at a time, so that a second loss shows which run
-- caused it. Last, for each place (`later`), comes the next staged instant.
--   $1 workers  $2 for each free slot, whose it is (from 1)  $3 lanes  $4 tenants  $5 shares
--   $6 floors of ready runs  $7 floors of staged runs  $8 whether runs past their deadline are passed over
-- :include slots
suspects as materialized (
    -- How many of the workers hold no suspect: each of them may take one. Evaluated only if a suspect is met.
    select count(*) filter (where s.held is null) as welcome
      from unnest($1::uuid[]) as k(id)
      left join lateral (
            select true as held from runs s
             where s.worker_id = k.id and s.losses > 0 and s.state in ('running', 'stopping')
             limit 1) s on true
),
want as (
    select w.lane_id, w.tenant_id,
-- :include open_share
           w.floor, w.due_floor, w.turn
      from unnest($3::int[], $4::int[], $5::int[], $6::timestamptz[], $7::timestamptz[]) with ordinality
           as w(lane_id, tenant_id, share, floor, due_floor, turn)
),
ready as materialized (
    select w.turn, w.lane_id, r.*
      from want w
     cross join lateral (
            select r.ctid as place, r.tenant_id, r.id, r.job_id, r.trigger, r.attempt, r.overlap, r.limited, r.deadline_at,
                   r.key_id, r.circuit_id, r.canary, r.needs, r.joins, r.once,
                   r.losses > 0 and r.ready_at > now() - interval '10 seconds' as suspect
              from runs r
             where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'ready'
               and r.order_key >= w.floor
               and (r.losses = 0 or r.ready_at <= now() - interval '10 seconds' or (select welcome from suspects) > 0)
               and (not $8::bool or r.attempt > 0 or r.deadline_at is null or r.deadline_at >= now())
             order by r.order_key
             limit w.share
               for update skip locked) r
),
got as materialized (
    -- How many of each want are found, by its turn: an array, for looking through `ready` once for each tenant would cost
    -- more than finding them did.
    select array_agg(g.found order by g.turn) as found
      from (select turn, sum(found)::int as found
              from (select turn, 1 as found from ready union all select turn, 0 from want) f
             group by turn) g
),
due as materialized (
    select w.turn, w.lane_id, r.*
      from want w
     cross join lateral (
            select r.ctid as place, r.tenant_id, r.id, r.job_id, r.trigger, r.attempt, r.overlap, r.limited, r.deadline_at,
                   r.key_id, r.circuit_id, r.canary, r.needs, r.joins, r.once,
                   r.losses > 0 and r.ready_at > now() - interval '10 seconds' as suspect
              from runs r
             where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'staged'
               and r.ready_at >= w.due_floor and r.ready_at <= now()
               and not (
-- :include unjudged
               )
               and (r.losses = 0 or r.ready_at <= now() - interval '10 seconds' or (select welcome from suspects) > 0)
               and (not $8::bool or r.attempt > 0 or r.deadline_at is null or r.deadline_at >= now())
             order by r.ready_at
             limit w.share - (select found from got)[w.turn]
               for update skip locked) r
),
judged as materialized (
    select p.place, p.lane_id, p.tenant_id, p.id, p.job_id, p.key_id, p.joins or p.once as awaited,
           p.limited or coalesce(p.overlap in ('queue', 'queue_all', 'replace'), false) as gates,
           case
               when h.job_id is not null then 'paused'
               when p.deadline_at < now() and p.attempt = 0 then 'expired'
               when p.overlap is null or p.trigger <> 'schedule' or p.attempt > 0 or not exists (
                    select from runs e
                     where e.job_id = p.job_id and e.id < p.id and e.trigger <> 'backfill'
                       and (e.state in ('ready', 'waiting', 'running', 'stopping')
                            or e.state = 'staged' and (e.ready_at <= now() or e.attempt > 0)))
               then case
                        when p.circuit_id is not null and exists (
                             select from circuits c
                              where c.tenant_id = p.tenant_id and c.id = p.circuit_id
                                and (c.state = 'open' or c.state = 'half_open' and not p.canary))
                        then 'breaker'
                        when p.needs is not null or p.suspect
                        then case when p.limited then 'fitted_limited' else 'fitted' end
                        when p.limited then 'limited'
                        else 'go'
                    end
               when p.overlap = 'skip' then 'skipped_overlap'
               when p.overlap = 'replace' then 'replace'
               -- One occurrence waits: is there an earlier one that has not started, behind yet another?
               when p.overlap = 'queue' and exists (
                    select from runs e
                     where e.job_id = p.job_id and e.id < p.id and e.trigger = 'schedule' and e.attempt = 0
                       and (e.state in ('ready', 'waiting') or e.state = 'staged' and e.ready_at <= now())
                       and exists (
                            select from runs f
                             where f.job_id = e.job_id and f.id < e.id and f.trigger <> 'backfill'
                               and (f.state in ('ready', 'waiting', 'running', 'stopping')
                                    or f.state = 'staged' and (f.ready_at <= now() or f.attempt > 0))))
               then 'coalesced'
               else 'overlap'
           end as verdict
      from (select * from ready union all select * from due) p
      left join holds h on h.tenant_id = p.tenant_id and h.job_id = p.job_id
),
going as (
    select place, row_number() over () as rank from judged where verdict = 'go'
),
claimed as (
    -- By the row's place, which is cheaper than its key. A row that moved between this statement's snapshot and its
    -- lock is not found there, stays as it was, and is claimed next time.
-- :include start
),
parked as (
    update runs r
       set state = 'waiting',
           blocked_by = case when j.verdict in ('paused', 'breaker') then j.verdict else 'overlap' end,
           blocked_key = case j.verdict when 'breaker' then r.circuit_id else r.job_id end, canary = false
      from judged j
     where j.verdict in ('paused', 'breaker', 'overlap', 'replace') and r.ctid = j.place
    returning r.id
),
ended as (
    delete from runs r
     using judged j
     -- A run whose end affects its job, a limit or other runs is only named: those must be locked before the run.
     where not j.awaited and r.ctid = j.place
       and (j.verdict in ('skipped_overlap', 'coalesced') or j.verdict = 'expired' and not j.gates)
    returning r.*, case j.verdict when 'expired' then 'expired' else 'skipped' end as final_state, j.verdict as reason,
              null::text as error
),
-- :include record_ended
select 'go' as verdict, c.tenant_id, c.id::text as id, c.job_id::text as job_id, c.job_version, c.attempt, c.fence,
       c.claim_id, c.slot, c.scheduled_for, c.ready_at, c.order_key, c.claimed_at, c.args, c.checkpoint, c.lane_id,
       c.logical_at, c.workflow_run_id::text as workflow_run_id, c.has_parents,
       c.once or c.circuit_id is not null or c.awaited
       or coalesce(c.overlap in ('queue', 'queue_all', 'replace'), false) as special,
       null::text as key_id, false as named
  from claimed c
union all
select j.verdict, j.tenant_id, j.id::text, j.job_id::text, 0, 0, 0, 0, 0, null, null, null, null, null, null, j.lane_id,
       null, null, false, true, j.key_id::text, j.awaited or j.verdict = 'expired' and j.gates
  from judged j
 where j.verdict <> 'go'
union all
select 'later', w.tenant_id, '', '', 0, 0, 0, 0, 0, null,
       (select r.ready_at from runs r
         where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'staged' and r.ready_at > now()
         order by r.ready_at
         limit 1),
       null, null, null, null, w.lane_id, null, null, false, true, null, false
  from want w

-- :name lock_limits
-- A limit that somebody else holds is left out: claims never wait.
select l.tenant_id, l.key::text as key
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, key)
 cross join lateral (
        select * from limits l
         where l.tenant_id = k.tenant_id and l.key = k.key
         limit 1
           for no key update skip locked) l

-- :name make_limits
-- Create the missing limits of these runs' jobs and keys: they were removed while unused. The transaction that creates
-- a limit holds its lock.
insert into limits (tenant_id, key, max)
select n.tenant_id, n.key, max(n.max)
  from unnest($1::int[], $2::uuid[], $3::uuid[]) as k(tenant_id, job_id, key_id)
 cross join lateral (select * from jobs j where j.tenant_id = k.tenant_id and j.id = k.job_id limit 1) j
 cross join lateral (
        values (k.tenant_id, k.job_id, coalesce(j.max_concurrency, 2147483647)), (k.tenant_id, k.key_id, j.key_max)
       ) as n(tenant_id, key, max)
  left join lateral (
        select true as known from limits l where l.tenant_id = n.tenant_id and l.key = n.key limit 1) l on true
 where n.key is not null and n.max is not null and l.known is null
 group by n.tenant_id, n.key
 order by n.tenant_id, n.key
    on conflict do nothing
returning tenant_id, key::text as key

-- :name lock_workers
-- Whoever gives out a worker's resources holds its row. One that somebody else holds is left out: claims never wait.
select w.id::text as id, w.resources, w.labels::text as labels
  from unnest($1::uuid[]) as k(id)
 cross join lateral (
        select * from workers w
         where w.id = k.id and w.state <> 'gone' and w.lease_until > now()
         limit 1
           for no key update skip locked) w

-- :name holdings
-- What the runs that these workers hold have of them, read after the locks: whatever a worker says, and whatever it knows
-- of, this is what was given out.
select k.id::text as id, u.used
  from unnest($1::uuid[]) as k(id)
 cross join lateral (
        select array[coalesce(sum(r.needs[1]), 0), coalesce(sum(r.needs[2]), 0), coalesce(sum(r.needs[3]), 0),
                     coalesce(sum(r.needs[4]), 0)]::bigint[] as used
          from runs r
         where r.worker_id = k.id and r.needs is not null and r.state in ('running', 'stopping')) u

-- :name suspected
-- The workers among these that hold a suspect, read after the locks.
select k.id::text as id
  from unnest($1::uuid[]) as k(id)
 cross join lateral (
        select from runs r where r.worker_id = k.id and r.losses > 0 and r.state in ('running', 'stopping') limit 1) r

-- :name still_queued
-- Which of these runs could start if there were room.
select r.id::text as id
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (
        select * from runs r
         where (r.tenant_id, r.id) between (k.tenant_id, k.id) and (k.tenant_id, k.id)
           and (r.state = 'ready' or r.state = 'staged' and r.ready_at <= now())
         limit 1) r

-- :name wanted_labels
-- The labels that these lanes prefer, and whether a worker that has them and may take from the lane lives.
select l.id, l.prefer::text as prefer,
       exists (select from workers w
                where w.pool = l.pool and w.state = 'live' and w.lease_until > now() and l.kind = any(w.targets)
                  and (l.kind <> 'python' or l.function = any(w.functions))
                  and w.labels @> (l.labels || l.prefer)) as near
  from lanes l
 where l.id = any($1::int[]) and l.prefer <> '{}'

-- :name weigh
-- What is to be known before runs with limits or needs may start, read after the locks: a snapshot from before would count what
-- another claim has just started as not running. First the runs, in their order, taken; then the limits.
--   $1 tenants  $2 runs  $3 tenants  $4 keys of the limits
(select r.place, r.tenant_id, r.id::text as id, r.lane_id, r.job_id::text as job_id, r.key_id::text as key_id,
        j.key_max as max, j.rate_gap, j.rate_burst, 0 as running, null::timestamptz as tat, now() as now, r.limited,
        r.needs, r.ready_at, r.order_key, r.losses > 0 and r.ready_at > now() - interval '10 seconds' as suspect
   from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
  cross join lateral (
         select r.ctid as place, r.* from runs r
          where (r.tenant_id, r.id) between (k.tenant_id, k.id) and (k.tenant_id, k.id)
            and r.state in ('ready', 'staged') and (r.limited or r.needs is not null or r.losses > 0)
          limit 1
            for update skip locked) r
  cross join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1) j
  order by r.order_key, r.id)
union all
select null, l.tenant_id, l.key::text, 0, null, null, l.max, null, null,
       (select count(*) from runs b where b.job_id = l.key and b.limited and b.state in ('running', 'stopping'))
       + (select count(*) from runs b where b.key_id = l.key and b.state in ('running', 'stopping')),
       l.tat, now(), true, null, null, null, false
  from unnest($3::int[], $4::uuid[]) as k(tenant_id, key)
 cross join lateral (select * from limits l where l.tenant_id = k.tenant_id and l.key = k.key limit 1) l

-- :name take_limited
-- ready | staged → running or waiting, as was decided under the locks of the limits and of the runs themselves.
--   $1 workers  $2 for each free slot, whose it is (from 1)  $3 places of those that start, in order
--   $4 places of those that wait  $5 for what  $6 of which key  $7 $8 keys whose rates were used  $9 their instants
-- :include slots
going as (
    select g.place, g.rank
      from unnest($3::tid[]) with ordinality as g(place, rank)
     cross join lateral (select from runs r where r.ctid = g.place and r.state in ('ready', 'staged') limit 1) r
),
claimed as (
-- :include start
),
parked as (
    update runs r
       set state = 'waiting', blocked_by = p.blocked_by, blocked_key = p.blocked_key
      from unnest($4::tid[], $5::text[], $6::uuid[]) as p(place, blocked_by, blocked_key)
     where r.ctid = p.place and r.state in ('ready', 'staged')
),
used as (
    update limits l
       set tat = u.tat
      from unnest($7::int[], $8::uuid[], $9::timestamptz[]) as u(tenant_id, key, tat)
     cross join lateral (
            select f.ctid as place from limits f where f.tenant_id = u.tenant_id and f.key = u.key limit 1) f
     where l.ctid = f.place
)
select 'go' as verdict, c.tenant_id, c.id::text as id, c.job_id::text as job_id, c.job_version, c.attempt, c.fence,
       c.claim_id, c.slot, c.scheduled_for, c.ready_at, c.order_key, c.claimed_at, c.args, c.checkpoint, c.lane_id,
       c.logical_at, c.workflow_run_id::text as workflow_run_id, c.has_parents,
       true as special
  from claimed c

-- :name take_ahead
-- staged → running before its instant, at most $6 ahead: it travels with its `start_at`. Whatever is decided when a run
-- falls due must be decided already, so only what nothing can block any more is taken: no exact limit, no circuit, no
-- pause, and no earlier run of its job that is alive or will be due by then. The rest is left for its instant.
-- Of the first thousand by time (or twice the share) those foremost in the order go, as a promotion would have it.
-- Also answered, for each place (`later`): the next instant that is left, and how far this looked ahead.
--   $1 workers  $2 for each free slot, whose it is (from 1)  $3 lanes  $4 tenants  $5 shares  $6 how far
-- :include slots
want as (
    select w.lane_id, w.tenant_id,
-- :include open_share
           w.turn
      from unnest($3::int[], $4::int[], $5::int[]) with ordinality as w(lane_id, tenant_id, share, turn)
),
near as materialized (
    select w.share, row_number() over (partition by w.turn order by r.order_key, r.id) as place_in_line, r.*
      from want w
     cross join lateral (
            select r.tenant_id, r.id, r.job_id, r.trigger, r.attempt, r.overlap, r.ready_at, r.order_key
              from runs r
             where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'staged'
               and r.ready_at > now() and r.ready_at <= now() + $6::interval and not r.limited
               and r.circuit_id is null and r.losses = 0
             order by r.ready_at
             limit greatest(2 * w.share, 1000)) r
),
clear as materialized (
    select n.tenant_id, n.id
      from near n
      left join holds h on h.tenant_id = n.tenant_id and h.job_id = n.job_id
     where n.place_in_line <= n.share and h.job_id is null
       and (n.overlap is null or n.trigger <> 'schedule' or n.attempt > 0 or not exists (
            select from runs e
             where e.job_id = n.job_id and e.id < n.id and e.trigger <> 'backfill'
               and (e.state <> 'staged' or e.ready_at <= n.ready_at or e.attempt > 0)))
),
going as materialized (
    select r.place, row_number() over () as rank
      from clear c
     cross join lateral (
            select r.ctid as place from runs r
             where (r.tenant_id, r.id) between (c.tenant_id, c.id) and (c.tenant_id, c.id)
               and r.state = 'staged'
             limit 1
               for update skip locked) r
),
claimed as (
-- :include start
)
select 'go' as verdict, c.tenant_id, c.id::text as id, c.job_id::text as job_id, c.job_version, c.attempt, c.fence,
       c.claim_id, c.slot, c.scheduled_for, c.ready_at, c.order_key, c.claimed_at, c.args, c.checkpoint, c.lane_id,
       c.logical_at, c.workflow_run_id::text as workflow_run_id, c.has_parents,
       c.once or c.awaited or coalesce(c.overlap in ('queue', 'queue_all', 'replace'), false) as special
  from claimed c
union all
select 'later', w.tenant_id, '', '', 0, 0, 0, 0, 0, now() + $6::interval,
       (select r.ready_at from runs r
         where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'staged' and r.ready_at > now()
           and r.id not in (select c.id from claimed c)
         order by r.ready_at
         limit 1),
       null, null, null, null, w.lane_id, null, null, false, true
  from want w

-- :name promote
-- staged (due) → ready: where more is due than can start, order and fairness rule, so it enters the ordered index.
with want as (
    select * from unnest($1::int[], $2::int[], $3::timestamptz[]) as w(lane_id, tenant_id, due_floor)
),
chosen as materialized (
    select r.place
      from want w
     cross join lateral (
            select r.ctid as place
              from runs r
             where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'staged'
               and r.ready_at >= w.due_floor and r.ready_at <= now()
               and not (
-- :include unjudged
               )
             order by r.ready_at
             limit $4
               for update skip locked) r
)
update runs r
   set state = 'ready'
  from chosen c
 where r.ctid = c.place
returning r.id

-- :name heads
-- Which tenants have something in these lanes, by skipping from tenant to tenant in the index, with the place of
-- their first run; and when the next staged run falls due.
with recursive ready as (
    select l.lane_id, h.tenant_id, h.order_key
      from unnest($1::int[]) as l(lane_id)
     cross join lateral (
            select r.tenant_id, r.order_key from runs r
             where r.state = 'ready' and r.lane_id = l.lane_id
             order by r.tenant_id, r.order_key limit 1) h
    union all
    select r.lane_id, h.tenant_id, h.order_key
      from ready r
     cross join lateral (
            select n.tenant_id, n.order_key from runs n
             where n.state = 'ready' and n.lane_id = r.lane_id and n.tenant_id > r.tenant_id
             order by n.tenant_id, n.order_key limit 1) h
),
staged as (
    select l.lane_id, h.tenant_id, h.ready_at
      from unnest($1::int[]) as l(lane_id)
     cross join lateral (
            select r.tenant_id, r.ready_at from runs r
             where r.state = 'staged' and r.lane_id = l.lane_id
             order by r.tenant_id, r.ready_at limit 1) h
    union all
    select r.lane_id, h.tenant_id, h.ready_at
      from staged r
     cross join lateral (
            select n.tenant_id, n.ready_at from runs n
             where n.state = 'staged' and n.lane_id = r.lane_id and n.tenant_id > r.tenant_id
             order by n.tenant_id, n.ready_at limit 1) h
)
select lane_id, tenant_id, order_key as head, null::timestamptz as due from ready
union all
select lane_id, tenant_id, null, ready_at from staged

-- :name heads_from
-- The same of places that are known, from where their live entries begin.
--   $1 lanes  $2 tenants  $3 floors of what is ready  $4 floors of what is staged
with known as (
    select *
      from unnest($1::int[], $2::int[], $3::timestamptz[], $4::timestamptz[]) as k(lane_id, tenant_id, floor, due_floor)
)
select k.lane_id, k.tenant_id, h.order_key as head, null::timestamptz as due
  from known k
 cross join lateral (
        select r.order_key from runs r
         where r.lane_id = k.lane_id and r.tenant_id = k.tenant_id and r.state = 'ready' and r.order_key >= k.floor
         order by r.order_key limit 1) h
union all
select k.lane_id, k.tenant_id, null, h.ready_at
  from known k
 cross join lateral (
        select r.ready_at from runs r
         where r.lane_id = k.lane_id and r.tenant_id = k.tenant_id and r.state = 'staged' and r.ready_at >= k.due_floor
         order by r.ready_at limit 1) h

-- :name foremost
-- How many of the first $5 runs of all these places, in one order, stand in each of them.
--   $1 lanes  $2 tenants  $3 floors of what is ready  $4 floors of what is staged
select f.place::int as place, count(*)::int as runs
  from (select w.place, r.order_key
          from unnest($1::int[], $2::int[], $3::timestamptz[], $4::timestamptz[]) with ordinality
               as w(lane_id, tenant_id, floor, due_floor, place)
         cross join lateral (
                (select r.order_key from runs r
                  where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'ready'
                    and r.order_key >= w.floor
                    and (r.attempt > 0 or r.deadline_at is null or r.deadline_at >= now())
                  order by r.order_key
                  limit $5)
                union all
                (select r.order_key from runs r
                  where r.lane_id = w.lane_id and r.tenant_id = w.tenant_id and r.state = 'staged'
                    and r.ready_at >= w.due_floor and r.ready_at <= now()
                    and (r.attempt > 0 or r.deadline_at is null or r.deadline_at >= now())
                  order by r.ready_at
                  limit $5)) r
         order by r.order_key
         limit $5) f
 group by f.place

-- :name tenants
select id, weight, max_running, suspended_at is not null as suspended from tenants

-- :name pools
select name, policy, head_start, paused_at is not null as paused, tenants from pools

-- :name running
-- How many runs of these tenants workers hold.
select r.tenant_id, count(*)::int as runs
  from workers w
 cross join lateral (
        select r.tenant_id from runs r
         where r.worker_id = w.id and r.state in ('running', 'stopping') and r.tenant_id = any($1::int[])
        offset 0) r
 where w.state <> 'gone' and w.id <> '00000000-0000-7000-8000-000000000001'
 group by r.tenant_id
