-- :name lapse
-- Workers whose lease has ended on the database's clock. From here on they are gone, even if they report again. A
-- worker that was not draining went down. If it held exactly one run that an earlier worker was lost with, that run is
-- its suspect.
with lapsed as (
    select id from workers where state <> 'gone' and lease_until < now() order by id limit 100 for update skip locked
),
suspects as (
    select l.id, s.runs[1] as suspect_id
      from lapsed l
     cross join lateral (
            select array_agg(r.id) as runs
              from (select r.id from runs r
                     where r.worker_id = l.id and r.losses > 0 and r.state in ('running', 'stopping')
                     limit 2) r) s
     where cardinality(s.runs) = 1
)
update workers w
   set state = 'gone', gone_at = now(), went_down = w.state = 'live',
       suspect_id = case when w.state = 'live' then (select s.suspect_id from suspects s where s.id = w.id) end
  from lapsed
 where w.id = lapsed.id
returning w.id::text as id, w.name

-- :name orphans
-- Runs whose worker is gone. A run that was its worker's only suspect is poison if its previous attempt also ended with
-- a worker that went down and has not come back since.
select r.worker_id::text as worker_id, r.id::text as id, r.attempt, r.fence, r.tenant_id,
       r.id is not distinct from w.suspect_id and exists (
            select from (select h.worker_id, h.outcome, h.finished_at from history h
                          where h.tenant_id = r.tenant_id and h.run_id = r.id
                          order by h.attempt desc
                          limit 1) h
             cross join lateral (select * from workers b where b.id = h.worker_id limit 1) b
             -- If the worker reported the end of the attempt itself, it did so before it went down.
             where h.outcome = 'lost' and b.went_down and h.finished_at >= b.gone_at) as poison
  from (select id, suspect_id from workers where state = 'gone' and gone_at > now() - interval '1 day') w
 cross join lateral (
        select * from runs r where r.worker_id = w.id and r.state in ('running', 'stopping') limit 1000) r
 limit 1000

-- :name strays
-- $2 of the workers that hold runs, in order from $1 on, skipping from one to the next in the index; `stray`: the
-- worker is unknown, or it has been gone for so long that `orphans` does not see it.
with recursive holders as (
    (select r.worker_id, 1 as n from runs r
      where r.state in ('running', 'stopping') and r.worker_id > $1
      order by r.worker_id limit 1)
    union all
    select k.worker_id, h.n + 1
      from holders h
     cross join lateral (
            select r.worker_id from runs r
             where r.state in ('running', 'stopping') and r.worker_id > h.worker_id
             order by r.worker_id limit 1) k
     where h.n < $2
)
select h.worker_id::text as id,
       w.state is null or w.state = 'gone' and w.gone_at <= now() - interval '1 day' as stray
  from holders h
  left join lateral (select w.state, w.gone_at from workers w where w.id = h.worker_id limit 1) w on true
 order by h.worker_id

-- :name held_by
-- Runs of these workers, in order.
select r.worker_id::text as worker_id, r.id::text as id, r.attempt, r.fence, r.tenant_id, false as poison
  from unnest($1::uuid[]) as k(id)
 cross join lateral (
        select * from runs r where r.worker_id = k.id and r.state in ('running', 'stopping') limit $2) r
 limit $2
