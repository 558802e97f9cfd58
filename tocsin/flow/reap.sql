-- :name lapse
-- Workers whose lease is over on the database's clock. From here on they are gone, whatever they say. One that was not
-- to be drained went down, and if it held just one run that a worker before was lost with, that run is its suspect.
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
-- Runs whose worker is gone. One that was its worker's only suspect is poison if its attempt before this one ended with a
-- worker that went down, too, and has not come back since.
select r.worker_id::text as worker_id, r.id::text as id, r.attempt, r.fence, r.tenant_id,
       r.id is not distinct from w.suspect_id and exists (
            select from (select h.worker_id, h.outcome, h.finished_at from history h
                          where h.tenant_id = r.tenant_id and h.run_id = r.id
                          order by h.attempt desc
                          limit 1) h
             cross join lateral (select * from workers b where b.id = h.worker_id limit 1) b
             -- An end that the worker reported itself came before it went down.
             where h.outcome = 'lost' and b.went_down and h.finished_at >= b.gone_at) as poison
  from (select id, suspect_id from workers where state = 'gone' and gone_at > now() - interval '1 day') w
 cross join lateral (
        select * from runs r where r.worker_id = w.id and r.state in ('running', 'stopping') limit 1000) r
 limit 1000
