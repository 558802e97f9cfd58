-- :name find
-- By what may be stored of a key, the likeliest first.
select k.id::text as id, k.name, k.role, k.tenant_id, k.hashed_by, k.scopes::text as scopes, k.serves, t.slug,
       t.max_jobs, t.max_queued, t.max_running, t.submit_rate, t.log_bytes_per_day, t.suspended_at is not null as suspended
  from unnest($1::bytea[]) as h(hash)
 cross join lateral (
        select * from api_keys k
         where k.hash = h.hash and k.revoked_at is null and (k.expires_at is null or k.expires_at > now())
         limit 1) k
 cross join lateral (select * from tenants t where t.id = k.tenant_id limit 1) t
 limit 1

-- :name living
select k.id::text as id
  from unnest($1::uuid[]) as w(id)
 cross join lateral (
        select k.id from api_keys k
         where k.id = w.id and k.revoked_at is null and (k.expires_at is null or k.expires_at > now())
         limit 1) k

-- :name used
-- Those of which nobody has said so for some minutes, and those that are stored under an older pepper.
--   $1 keys  $2 what is to be stored of them instead, if anything  $3 by which pepper that was made
with used as materialized (
    select k.place, u.anew
      from unnest($1::uuid[], $2::bytea[]) as u(id, anew)
     cross join lateral (
            select k.ctid as place, k.last_used_at from api_keys k where k.id = u.id limit 1 for no key update skip locked) k
     where u.anew is not null or k.last_used_at is null or k.last_used_at < now() - interval '5 minutes'
)
update api_keys k
   set last_used_at = now(), hash = coalesce(u.anew, k.hash),
       hashed_by = case when u.anew is null then k.hashed_by else $3 end
  from used u
 where k.ctid = u.place

-- :name add
insert into api_keys (id, tenant_id, hash, hashed_by, role, name, scopes, serves, expires_at)
values ($1, $2, $3, $4, $5, $6, $7::jsonb, $8::int[], $9)

-- :name list
select id::text as id, role, name, scopes::text as scopes, serves, created_at, expires_at, revoked_at, last_used_at
  from api_keys
 where tenant_id = $1 and ($2::uuid is null or id < $2) and ($4::uuid is null or id = $4)
 order by id desc
 limit $3

-- :name lock
select role, name, scopes::text as scopes, serves, created_at, expires_at, now() as now,
       revoked_at is null and (expires_at is null or expires_at > now()) as alive
  from api_keys
 where tenant_id = $1 and id = $2
   for no key update

-- :name end_at
-- Never later than it would have ended anyway.
update api_keys set expires_at = least(expires_at, now() + $3::interval) where tenant_id = $1 and id = $2 returning expires_at

-- :name revoke
update api_keys set revoked_at = coalesce(revoked_at, now()) where tenant_id = $1 and id = $2

-- :name log_out
insert into logouts (key_id, not_before) values ($1, now())
    on conflict (key_id) do update set not_before = excluded.not_before

-- :name logged_out
select w.key_id::text as key_id
  from unnest($1::uuid[], $2::float8[]) as w(key_id, began)
 cross join lateral (
        select from logouts l where l.key_id = w.key_id and l.not_before >= to_timestamp(w.began) limit 1) l

-- :name token_key
select token_key from cluster

-- :name found_cluster
insert into cluster (token_key) values ($1) on conflict do nothing

-- :name found_tenant
insert into tenants (slug) values ('default') on conflict do nothing

-- :name founded
select id from tenants where slug = 'default'
