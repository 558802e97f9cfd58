-- :name find
select k.id::text as id, k.name, k.role, k.tenant_id, t.slug,
       t.max_jobs, t.max_queued, t.max_running, t.submit_rate, t.log_bytes_per_day
  from api_keys k
  join tenants t on t.id = k.tenant_id
 where k.hash = $1 and k.revoked_at is null and (k.expires_at is null or k.expires_at > now())

-- :name living
select k.id::text as id
  from unnest($1::uuid[]) as w(id)
 cross join lateral (
        select k.id from api_keys k
         where k.id = w.id and k.revoked_at is null and (k.expires_at is null or k.expires_at > now())
         limit 1) k

-- :name tenant
select * from tenants where slug = $1

-- :name lock_tenant
select * from tenants where slug = $1 for no key update

-- :name add_tenant
insert into tenants (slug, weight, max_jobs, max_queued, max_running, submit_rate, log_bytes_per_day)
values ($1, $2, $3, $4, $5, $6, $7)
    on conflict do nothing
returning *

-- :name change_tenant
update tenants
   set weight = $2, max_jobs = $3, max_queued = $4, max_running = $5, submit_rate = $6, log_bytes_per_day = $7,
       http_allow = $8, runs_days = $9, legal_hold = $10
 where slug = $1

-- :name http_allow
select t.id, t.http_allow
  from unnest($1::int[]) as w(id)
 cross join lateral (select * from tenants t where t.id = w.id and t.http_allow <> '{}' limit 1) t

-- :name tenants
select * from tenants where ($1::int is null or id < $1) order by id desc limit $2

-- :name add
insert into api_keys (id, tenant_id, hash, role, name) values ($1, $2, $3, $4, $5)

-- :name list
select id::text as id, role, name, created_at, expires_at, revoked_at
  from api_keys
 where tenant_id = $1 and ($2::uuid is null or id < $2)
 order by id desc
 limit $3

-- :name revoke
update api_keys set revoked_at = coalesce(revoked_at, now()) where tenant_id = $1 and id = $2 returning id

-- :name token_key
select token_key from cluster

-- :name found_cluster
insert into cluster (token_key) values ($1) on conflict do nothing
