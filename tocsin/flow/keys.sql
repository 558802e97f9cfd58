-- :name find
select k.id::text as id, k.name, k.role, k.tenant_id, t.slug,
       t.max_jobs, t.max_queued, t.max_running, t.submit_rate, t.log_bytes_per_day, t.suspended_at is not null as suspended
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

-- :name found_tenant
insert into tenants (slug) values ('default') on conflict do nothing

-- :name founded
select id from tenants where slug = 'default'
