-- :name overdue
-- First attempts that did not start before their deadline.
select r.tenant_id, r.id::text as id, r.job_id::text as job_id, r.key_id::text as key_id, r.once, r.limited, r.overlap
  from runs r
 where r.deadline_at < now() and r.attempt = 0 and r.state in ('staged', 'ready', 'waiting')
 order by r.deadline_at
 limit $1

-- :name may_take
-- For a worker `w` and a lane `l`: the worker may take from the lane. The same rule as `LaneBook.open_to`.
               and w.pool = l.pool and l.kind = any(w.targets) and (l.kind <> 'python' or l.function = any(w.functions))
               and w.labels @> l.labels
               and not exists (select from unnest(l.needs, w.resources) as n(most, has) where n.has <= n.most / 2 and n.most > 0)

-- :name vouch
-- The lanes among these with an occurrence to be judged. For each, the longest-connected worker vouches that the lane
-- has had a worker since then, if there is one.
with late as materialized (
    select l.lane_id
      from unnest($1::int[]) as l(lane_id)
     cross join lateral (
            select from runs r
             where r.lane_id = l.lane_id and r.state = 'staged' and (
-- :include unjudged
             )
             limit 1) r
),
vouchers as (
    insert into lane_vouchers (lane_id, worker_id)
    select t.lane_id, w.id
      from late t
      join lanes l on l.id = t.lane_id
     cross join lateral (
            select w.id from workers w
             where w.state <> 'gone' and w.lease_until > now()
-- :include may_take
             order by w.registered_at
             limit 1) w
        on conflict (lane_id) do update set worker_id = excluded.worker_id
     where lane_vouchers.worker_id <> excluded.worker_id
)
select lane_id from late

-- :name misfired
-- Staged occurrences that are late, with their jobs' misfire rules; `misfire`: for more than a minute after its instant
-- no worker could take it, because its lane had no living worker, its pool was paused or its tenant suspended.
with late as materialized (
    select r.*
      from unnest($1::int[]) as l(lane_id)
     cross join lateral (
            select r.* from runs r
             where r.lane_id = l.lane_id and r.state = 'staged' and (
-- :include unjudged
             )
             order by r.tenant_id, r.ready_at
             limit 1000) r
     -- Each of these rows is moved or ended, so that the next turn finds the others.
     limit 5000
),
served as materialized (
    -- When each of these lanes had a worker, from the instant of its first late occurrence on.
    select f.lane_id, range_agg(tstzrange(w.registered_at, greatest(w.registered_at, least(w.gone_at, w.lease_until)), '[]')) as spans
      from (select t.lane_id, min(t.ready_at) as first from late t group by t.lane_id) f
      join lanes l on l.id = f.lane_id
     cross join lateral (
            select * from workers w
             where (w.state <> 'gone' or w.gone_at >= f.first)
-- :include may_take
             ) w
     group by f.lane_id
)
select r.tenant_id, r.id::text as id, r.job_id::text as job_id, r.key_id::text as key_id, r.once, r.limited, r.overlap,
       not coalesce(s.spans && tstzrange(r.ready_at, r.ready_at + interval '60 seconds', '[]'), false)
       or exists (select from tenants t where t.id = r.tenant_id
                     and (r.ready_at >= t.suspended_at
                          or r.ready_at >= t.suspended_from and r.ready_at < t.suspended_until - interval '60 seconds'))
       or exists (select from lanes l join pools p on p.name = l.pool where l.id = r.lane_id
                     and (r.ready_at >= p.paused_at
                          or r.ready_at >= p.paused_from and r.ready_at < p.paused_until - interval '60 seconds'))
           as misfire,
       r.ready_at < now() - (j.schedule::json #>> '{misfire,window}')::interval as too_old,
       coalesce(j.schedule::json #>> '{misfire,policy}', 'latest') as policy,
       exists (select from runs later
                where later.job_id = r.job_id and later.trigger = 'schedule' and later.attempt = 0
                  and later.state in ('staged', 'ready') and later.ready_at <= now()
                  and later.scheduled_for > r.scheduled_for) as superseded
  from late r
  left join served s on s.lane_id = r.lane_id
 cross join lateral (select * from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1) j

-- :name keep
-- staged → ready: a late occurrence that is to run all the same.
with chosen as materialized (
    select r.ctid as place
      from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
     cross join lateral (
            select r.ctid, r.state from runs r
             where (r.tenant_id, r.id) between (k.tenant_id, k.id) and (k.tenant_id, k.id)
             limit 1
               for update) r
     where r.state = 'staged'
)
update runs r
   set state = 'ready'
  from chosen c
 where r.ctid = c.place
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name waiting
-- $2 of the jobs and keys that runs wait for, in order from $1 on, skipping from one to the next in the index; `held`:
-- a pause or a circuit holds these runs, and the end of it releases them.
with recursive parked as (
    (select r.tenant_id, r.blocked_key, 1 as n from runs r
      where r.state = 'waiting' and r.blocked_key > $1
      order by r.blocked_key limit 1)
    union all
    select k.tenant_id, k.blocked_key, p.n + 1
      from parked p
     cross join lateral (
            select r.tenant_id, r.blocked_key from runs r
             where r.state = 'waiting' and r.blocked_key > p.blocked_key
             order by r.blocked_key limit 1) k
     where p.n < $2
)
select p.tenant_id, p.blocked_key::text as key,
       exists (select from holds h where h.tenant_id = p.tenant_id and h.job_id = p.blocked_key)
       or exists (select from circuits c where c.tenant_id = p.tenant_id and c.id = p.blocked_key) as held
  from parked p

-- :name due_to_replace
-- $3 unclaimed occurrences that replace the run before them, in order from ($1, $2) on. If all workers are busy, no
-- claim finds them, and the run that they replace must stop all the same.
select r.tenant_id, r.job_id::text as job_id, r.ready_at, r.id::text as id
  from runs r
 where r.overlap = 'replace' and r.trigger = 'schedule' and r.attempt = 0 and r.state in ('staged', 'ready')
   and (r.ready_at, r.id) > ($1, $2) and r.ready_at <= now()
 order by r.ready_at, r.id
 limit $3

-- :name replacing
-- The jobs among these with a due occurrence that replaces the runs before it (the youngest), and an earlier run that
-- was not asked to stop. Whether a late occurrence runs at all is decided elsewhere (misfire, deadline).
select k.tenant_id, k.job_id::text as job_id, w.id::text as id, e.keys
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, job_id)
 cross join lateral (
        select w.id, w.overlap from runs w
         where w.job_id = k.job_id and w.trigger = 'schedule' and w.attempt = 0
           and (w.state = 'ready' or w.state = 'waiting' and w.blocked_by = 'overlap'
                or w.state = 'staged' and w.ready_at between now() - interval '60 seconds' and now())
           and (w.deadline_at is null or w.deadline_at >= now())
         order by w.scheduled_for desc
         limit 1) w
 cross join lateral (
        select coalesce(array_agg(distinct e.key_id::text) filter (where e.key_id is not null), '{}') as keys, count(*)
          from runs e
         where e.job_id = k.job_id and e.id < w.id and e.trigger <> 'backfill' and e.stop_reason is null
           and (e.trigger = 'schedule' or e.state = 'running')) e
 where w.overlap = 'replace' and e.count > 0
   and not exists (select from holds h where h.tenant_id = k.tenant_id and h.job_id = k.job_id)
 limit $3

-- :name unpause
-- waiting → ready: parked by a pause that is over, of these jobs.
with chosen as materialized (
    select r.place
      from unnest($1::uuid[]) as k(job_id)
     cross join lateral (
            select r.ctid as place from runs r
             where r.state = 'waiting' and r.blocked_key = k.job_id and r.blocked_by = 'paused'
             order by r.order_key
             limit 1000
               for update skip locked) r
)
update runs r
   set state = 'ready', blocked_by = null, blocked_key = null
  from chosen c
 where r.ctid = c.place
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name coming
-- For `r`, that belongs to a chain: whether somebody can still come. A job that it follows from has a live run in its chain,
-- the run by hand that began it has not ended, or a schedule still owes the instant. An occurrence that a pause holds back
-- is not run when its job is resumed, unless that is a one-time job.
  left join lateral (
        with recursive up(id) as (
            select d.parent_id from dependencies d
             where (d.child_id, d.tenant_id) between (r.job_id, r.tenant_id) and (r.job_id, r.tenant_id)
            union
            select d.parent_id
              from up
             cross join lateral (
                    select d.parent_id from dependencies d
                     where (d.child_id, d.tenant_id) between (up.id, r.tenant_id) and (up.id, r.tenant_id) offset 0) d
        )
        select true as coming
          from up
         cross join lateral (
                (select from runs c where c.job_id = up.id and c.join_key = r.join_key limit 1)
                union all
                (select from runs c where c.job_id = up.id and c.id = r.join_key limit 1)
                union all
                (select from runs c
                  where r.chain is null and c.job_id = up.id and c.scheduled_for = r.logical_at and c.trigger = 'schedule'
                  limit 1)
                union all
                (select
                   from triggers t
                  cross join lateral (
                         select j.once from jobs j where j.tenant_id = t.tenant_id and j.id = t.job_id limit 1) j
                  where r.chain is null and t.tenant_id = r.tenant_id and t.job_id = up.id
                    and (t.next_fire_at <= r.logical_at
                         or t.held_at <= r.logical_at and (j.once or r.logical_at > now()))
                  limit 1)
                limit 1) c
         limit 1) n on true

-- :name joining
-- Runs that wait for runs of other jobs, in their order from $1 on; `stranded`: nobody can still come.
select r.tenant_id, r.id::text as id, r.job_id::text as job_id, r.logical_at, r.join_key::text as join_key,
       r.pending_parents, coalesce(r.parents::text[], '{}') as parents, n.coming is null as stranded
  from (select * from runs r
         where r.state = 'waiting' and r.blocked_by = 'parent' and r.join_key is not null and r.id > $1
         order by r.id
         limit $2) r
-- :include coming

-- :name forget_joins
-- Runs that ended while they waited for others of which none can still come are forgotten; $2 of them are looked at, in
-- their order from $1 on. The last of these is answered if there may be more.
with seen as materialized (
    select * from ended_joins e where e.run_id > $1 order by e.run_id limit $2
),
over as materialized (
    select r.tenant_id, r.job_id, r.join_key
      from seen r
-- :include coming
     where n.coming is null
),
gone as (
    delete from ended_joins e
     using over o
     where e.tenant_id = o.tenant_id and e.job_id = o.job_id and e.join_key = o.join_key
)
select run_id::text from seen order by run_id offset $2 - 1

-- :name unused
-- For `l`, a limit: no run uses it, waits for it or was released by it, its rate has recovered, and its job cannot get
-- more runs. Future runs do not count: the transaction that stages or claims them creates the limit again.
       (l.tat is null or l.tat <= now())
       and coalesce((select j.state from jobs j where j.tenant_id = l.tenant_id and j.id = l.key limit 1), '')
           not in ('active', 'paused')
       and (select true from runs r
             where r.job_id = l.key and r.limited and r.state in ('running', 'stopping') limit 1) is null
       and (select true from runs r where r.key_id = l.key and r.state in ('running', 'stopping') limit 1) is null
       and (select true from runs r where r.state = 'waiting' and r.blocked_key = l.key limit 1) is null
       and (select true from runs r where r.state = 'ready' and r.blocked_key = l.key limit 1) is null

-- :name limits
-- $3 limits in order from ($1, $2) on, and whether each is unused.
select l.tenant_id, l.key::text as key,
-- :include unused
       as unused
  from (select * from limits l where (l.tenant_id, l.key) > ($1, $2) order by l.tenant_id, l.key limit $3) l

-- :name lock_unused
-- A limit that another transaction has locked is in use.
select l.tenant_id, l.key::text as key
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, key)
 cross join lateral (
        select * from limits l where l.tenant_id = k.tenant_id and l.key = k.key limit 1 for update skip locked) l

-- :name drop_limits
-- Delete those of these locked limits that are still unused.
delete from limits l
 using unnest($1::int[], $2::uuid[]) as k(tenant_id, key)
 cross join lateral (
        select l.ctid as place from limits l
         where l.tenant_id = k.tenant_id and l.key = k.key and
-- :include unused
         limit 1) f
 where l.ctid = f.place
