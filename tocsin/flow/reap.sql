-- :name lapse
-- Workers whose lease is over on the database's clock. From here on they are gone, whatever they say.
with lapsed as (
    select id from workers where state <> 'gone' and lease_until < now() order by id limit 100 for update skip locked
)
update workers w
   set state = 'gone', gone_at = now()
  from lapsed
 where w.id = lapsed.id
returning w.id::text as id, w.name

-- :name orphans
-- Runs whose worker is gone.
select r.worker_id::text as worker_id, r.id::text as id, r.attempt, r.fence, r.tenant_id
  from (select id from workers where state = 'gone' and gone_at > now() - interval '1 day') w
 cross join lateral (
        select * from runs r where r.worker_id = w.id and r.state in ('running', 'stopping') limit 1000) r
 limit 1000
