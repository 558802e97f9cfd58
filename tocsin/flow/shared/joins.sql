-- :name settle
-- waiting → ready, of runs whose last parent has ended and that nothing speaks against; all others only count who is still
-- to end. Two parents that end at once take a child's row one after the other. The runs come in the order of ids.
-- Answered is what is decided by it: `ready`, `doomed`, `map` (its runs are to be made), `mapped` (they have ended),
-- `stopped` (they were stopped) or `head` (a workflow run whose nodes have all ended).
--   $1 tenants  $2 runs  $3 how many of those that each waits for have ended  $4 what that does to it
--   $5 which they were, where its row does not know it yet
with locked as materialized (
    select r.tenant_id, r.id, r.job_id, r.lane_id, r.state, r.map, r.pending_parents - t.ended as pending,
           greatest(r.doomed, t.doomed) as doomed, t.parents::uuid[] as parents, t.place
      from unnest($1::int[], $2::uuid[], $3::int[], $4::smallint[], $5::text[]) with ordinality
           as t(tenant_id, id, ended, doomed, parents, place)
     cross join lateral (
            select * from runs r
             where (r.tenant_id, r.id) between (t.tenant_id, t.id) and (t.tenant_id, t.id)
               and r.pending_parents > 0 and r.state in ('waiting', 'running', 'stopping')
             limit 1
               for update) r
),
free as materialized (
    select l.tenant_id, l.id, l.parents, l.place, j.start_deadline, p.head_start
      from locked l
     cross join lateral (select * from jobs j where j.tenant_id = l.tenant_id and j.id = l.job_id limit 1) j
      join lanes n on n.id = l.lane_id
      join pools p on p.name = n.pool
     where l.pending = 0 and l.doomed = 0 and l.map is null and l.state = 'waiting'
),
released as (
    update runs r
       set state = 'ready', blocked_by = null, pending_parents = 0, ready_at = now(), deadline_at = now() + f.start_deadline,
           order_key = now() - (r.priority - 500) * f.head_start + f.place * interval '1 microsecond',
           parents = case when f.parents is null then r.parents else coalesce(r.parents, '{}') || f.parents end
      from free f
     where (r.tenant_id, r.id) between (f.tenant_id, f.id) and (f.tenant_id, f.id)
    returning r.tenant_id, r.id, r.lane_id, r.ready_at, r.order_key
),
counted as (
    update runs r
       set pending_parents = l.pending, doomed = l.doomed,
           parents = case when l.parents is null then r.parents else coalesce(r.parents, '{}') || l.parents end
      from locked l
     where not (l.pending = 0 and l.doomed = 0 and l.map is null and l.state = 'waiting')
       and (r.tenant_id, r.id) between (l.tenant_id, l.id) and (l.tenant_id, l.id)
    returning r.tenant_id, r.id, r.doomed, r.job_id, r.map, r.parents, r.priority, r.workflow_run_id, r.logical_at,
              r.scheduled_for, r.pending_parents, r.stop_reason, l.state
)
select 'ready' as what, tenant_id, id::text as id, lane_id, ready_at, order_key, 0 as doomed, null::text as job_id,
       null::text as map, null::text as parents, 0 as priority, null::text as workflow_run_id,
       null::timestamptz as logical_at, null::timestamptz as scheduled_for
  from released
union all
select case when state <> 'waiting' then 'head'
            when map = '{}' and stop_reason is not null and doomed > 0 then 'stopped'
            when map = '{}' then 'mapped'
            when doomed > 0 then 'doomed'
            else 'map' end,
       tenant_id, id::text, null, null, null, doomed, job_id::text, map, parents::text, priority, workflow_run_id::text,
       logical_at, scheduled_for
  from counted
 where pending_parents = 0

-- :name hold_below
-- Take runs that wait, and all below them that may be decided with them, in the order of ids: by what has ended so far, be
-- it that some of it was told by others, each of these may end without an attempt. Nothing is taken if none of them may.
--   $1 tenants  $2 runs  $3 what is done to each
with recursive below(tenant_id, id, doomed) as (
    select t.tenant_id, t.id, t.doomed > 0 from unnest($1::int[], $2::uuid[], $3::smallint[]) as t(tenant_id, id, doomed)
    union
    select b.tenant_id, f.id, f.wants <> 'c'
      from below b
     cross join lateral (
            -- By its key alone: beside its state, the index of all that waits would seem to do, and be read for each.
            select * from runs r
             where (r.tenant_id, r.id) between (b.tenant_id, b.id) and (b.tenant_id, b.id)
             limit 1) r
     cross join lateral (
            select f.id, substr(r.feeds_on, f.n::int, 1) as wants
              from unnest(r.feeds) with ordinality as f(id, n)) f
     where f.wants <> 'h' and r.state = 'waiting' and (b.doomed or r.doomed > 0 or r.map is not null)
)
select r.id
  from (select distinct b.tenant_id, b.id from below b
         where (select count(*) from below) > cardinality($1)
         order by b.tenant_id, b.id) b
 cross join lateral (
        select r.id from runs r
         where (r.tenant_id, r.id) between (b.tenant_id, b.id) and (b.tenant_id, b.id) and r.pending_parents > 0
         limit 1
           for update) r

-- :name conclude
-- waiting → skipped | succeeded | dead | cancelled: runs that end without an attempt of their own, because others have ended. They are
-- held already.
with decided as (
    select r.ctid as place, d.state as final_state, d.reason,
           case when d.reason = 'map_failed' then coalesce(d.error, (
                -- Its elements have ended.
                select format('%s of %s runs failed', count(*) filter (where m.state <> 'succeeded'), count(*))
                  from history m
                 where m.tenant_id = d.tenant_id and m.workflow_run_id = r.workflow_run_id and m.job_id = r.job_id
                   and m.origin_run_id = d.id and m.final)) end as error
      from unnest($1::int[], $2::uuid[], $3::text[], $4::text[], $5::text[]) as d(tenant_id, id, state, reason, error)
     cross join lateral (
            select r.ctid, r.workflow_run_id, r.job_id from runs r
             where (r.tenant_id, r.id) between (d.tenant_id, d.id) and (d.tenant_id, d.id)
             limit 1) r
),
ended as (
    delete from runs r
     using decided d
     where r.ctid = d.place and r.state = 'waiting'
    returning r.*, d.final_state, d.reason, d.error
),
-- :include record_ended
select id::text as id,
-- :include family
  from ended

-- :name result
-- What a run ended with, and of how many bytes; not if these are more than $3.
select case when e.size <= $3 then e.result end as result, e.size
  from history h
 cross join lateral (
        select
-- :include ended_with
        as result) r
 cross join lateral (select r.result, coalesce(octet_length(r.result), 0) as size) e
 where h.tenant_id = $1 and h.run_id = $2 and h.final

-- :name put_off
-- It waits for what it is mapped over to be fetched, as for one more parent.
with noted as (
    insert into unmapped (tenant_id, run_id) values ($1, $2) on conflict do nothing
)
update runs r
   set pending_parents = 1
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)

-- :name mapped
-- It waits for so many runs of its own now. Answered is what these have their concurrency keys by.
update runs r
   set map = '{}', pending_parents = $3
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
returning statement_timestamp() as now,
          (select j.key_template from jobs j where j.tenant_id = r.tenant_id and j.id = r.job_id limit 1) as key_template

-- :name see_all
select set_config('tocsin.scope', '', true)

-- :name hold
-- Alone with a tenant's graph, until the end of the transaction.
select pg_advisory_xact_lock(hashtextextended('tocsin.graph:' || $1::int, 0))

-- :name share_one
-- Nobody changes a tenant's graph until the end of the transaction.
select pg_advisory_xact_lock_shared(hashtextextended('tocsin.graph:' || $1::int, 0))

-- :name share
-- The same of several, which come in order; and alone with chains, until the end of the transaction. Whoever ended the runs
-- may be kept to some jobs; those that wait for them need not be among these, and from here on are seen.
-- Chains share so many locks that a batch of any size finds room for its own in PostgreSQL's table of them.
--   $1 tenants  $2 keys of the chains
select pg_advisory_xact_lock_shared(hashtextextended('tocsin.graph:' || t.id, 0)), set_config('tocsin.scope', '', true)
  from unnest($1::int[]) as t(id)
union all
select pg_advisory_xact_lock(hashtext('tocsin.chains'), c.lock), ''
  from (select distinct hashtext(k.join_key::text) & 511 as lock from unnest($2::uuid[]) as k(join_key) order by 1) c

-- :name hold_chain
-- Alone with the chain that a run waits in, if it does.
select pg_advisory_xact_lock(hashtext('tocsin.chains'), hashtext(r.join_key::text) & 511)
  from runs r
 where (r.tenant_id, r.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid)
   and r.pending_parents > 0 and r.join_key is not null

-- :name as_mapped
-- The runs of a mapped node are of the version that the node's own run is of, and go where that says.
update runs r
   set job_version = m.job_version, lane_id = m.lane_id, max_attempts = m.max_attempts, limited = m.limited,
       circuit_id = m.circuit_id, needs = m.needs
  from unnest($3::uuid[]) as e(id)
 cross join lateral (
        select * from runs m
         where (m.tenant_id, m.id) between ($1::int, $2::uuid) and ($1::int, $2::uuid) limit 1) m
 where (r.tenant_id, r.id) between ($1::int, e.id) and ($1::int, e.id)
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name dependents
-- The jobs that depend on these; `whole`: all that each waits for is reached by what reached this one, for it began with
-- an instant that all have, or by hand with the job that all follow from. One whose run in the chain ended while it
-- waited, because it was cancelled, gets no other. `priority`, if it has not its own: what follows from a run of a
-- backfill never goes before that.
--   $1 tenants  $2 jobs  $3 the job whose run by hand began it  $4 keys of the chains
select e.n::int as n, d.child_id::text as child_id, d.wants, d.parents, statement_timestamp() as now,
       d.parents = 1 or e.chain is null or coalesce(d.root_id = e.chain, false) as whole,
       case when f.priority < c.priority then f.priority end as priority
  from unnest($1::int[], $2::uuid[], $3::uuid[], $4::uuid[]) with ordinality as e(tenant_id, job_id, chain, join_key, n)
  left join lateral (
        select h.priority from history h
         where h.tenant_id = e.tenant_id and h.run_id = e.join_key and h.trigger = 'backfill' and e.chain is not null
         limit 1) f on true
 cross join lateral (
        select * from dependencies d
         where (d.parent_id, d.tenant_id) between (e.job_id, e.tenant_id) and (e.job_id, e.tenant_id) offset 0) d
 cross join lateral (
        select c.priority from jobs c
         where c.tenant_id = e.tenant_id and c.id = d.child_id and c.state in ('active', 'paused') limit 1) c
 where not exists (select from ended_joins o
                    where o.tenant_id = e.tenant_id and o.job_id = d.child_id and o.join_key = e.join_key)

-- :name joined
select k.n::int as n, r.tenant_id, r.id::text as id
  from unnest($1::uuid[], $2::uuid[]) with ordinality as k(job_id, join_key, n)
 cross join lateral (
        select r.tenant_id, r.id from runs r where r.job_id = k.job_id and r.join_key = k.join_key limit 1) r

-- :name meet
-- One after the other, whoever ends a parent of the same job for the same instant. They come in order.
select pg_advisory_xact_lock(hashtextextended('tocsin.meet:' || m.child_id || m.instant, 0))
  from unnest($1::uuid[], $2::timestamptz[]) as m(child_id, instant)

-- :name ends
-- How the parents of these jobs ended for an instant: in this very chain, or else the last time, among their last ten
-- thousand ends. `coming`: one is still to end in this chain.
--   $1 tenants  $2 jobs  $3 instants  $4 the lowest ids of that time  $5 keys of the chains
select k.n::int as n, d.wants, e.run_id::text as run_id, e.state, e.reason,
       exists (select from runs r where r.job_id = d.parent_id and r.join_key = k.join_key) as coming
  from unnest($1::int[], $2::uuid[], $3::timestamptz[], $4::uuid[], $5::uuid[]) with ordinality
       as k(tenant_id, child_id, instant, first_id, join_key, n)
 cross join lateral (
        select * from dependencies d
         where (d.child_id, d.tenant_id) between (k.child_id, k.tenant_id) and (k.child_id, k.tenant_id) offset 0) d
  left join lateral (
        (select h.run_id, h.state, h.reason from history h
          where h.tenant_id = k.tenant_id and h.run_id = k.join_key and h.job_id = d.parent_id and h.final
          limit 1)
        union all
        (select h.run_id, h.state, h.reason
           from (select h.run_id, h.state, h.reason, coalesce(h.logical_at, h.scheduled_for) as instant
                   from history h
                  where h.job_id = d.parent_id and h.run_id >= k.first_id and h.tenant_id = k.tenant_id and h.final
                  order by h.run_id desc
                  limit 10000) h
          where h.instant = k.instant
          limit 1)
        limit 1) e on true

-- :name lock_joined
-- The runs of these jobs that wait in these chains, in their order.
select k.n::int as n, r.tenant_id, r.id::text as id
  from unnest($1::uuid[], $2::uuid[]) with ordinality as k(job_id, join_key, n)
 cross join lateral (
        select r.tenant_id, r.id from runs r
         where r.job_id = k.job_id and r.join_key = k.join_key and r.state = 'waiting' and r.pending_parents > 0
         limit 1
           for update) r

-- :name redeem
-- What those that have ended did to these runs, which are locked, is another thing now.
update runs r
   set doomed = t.doomed
  from unnest($1::int[], $2::uuid[], $3::smallint[]) as t(tenant_id, id, doomed)
 where (r.tenant_id, r.id) between (t.tenant_id, t.id) and (t.tenant_id, t.id)

-- :name lock_stranded
-- Those of these runs that still wait for as many as they did.
select r.id::text as id
  from unnest($1::int[], $2::uuid[], $3::int[]) as k(tenant_id, id, pending)
 cross join lateral (
        select r.id from runs r
         where (r.tenant_id, r.id) between (k.tenant_id, k.id) and (k.tenant_id, k.id)
           and r.pending_parents = k.pending
         limit 1
           for update) r
