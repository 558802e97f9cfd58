-- :name remember
-- Waits for another transaction with the same key, so that two calls in flight cannot both have an effect.
insert into idempotency (tenant_id, key, digest, status, ids, version)
select $1, $2, $3, $4, $5::uuid[], $6
    on conflict do nothing
returning true

-- :name hold
-- Calls with one key come one after the other, from before they look at anything.
select pg_advisory_xact_lock($1, hashtext($2))

-- :name recall
select digest, status, ids::text[] as ids, version from idempotency where tenant_id = $1 and key = $2

-- :name forget
-- Delete the oldest $1 records that no call can use any more. Returns how many.
with old as materialized (
    select i.ctid as place
      from idempotency i
     where i.created_at < now() - interval '24 hours 10 minutes'
     order by i.created_at
     limit $1
       for update skip locked
),
gone as (
    delete from idempotency i using old o where i.ctid = o.place returning 1
)
select count(*) from gone
