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
delete from idempotency where created_at < now() - interval '24 hours 10 minutes'
