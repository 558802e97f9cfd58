-- :name lock
select version from secrets where tenant_id = $1 and name = $2 for no key update

-- :name put
insert into secrets (tenant_id, name, version, id, key_id, wrapped, sealed) values ($1, $2, $3, $4, $5, $6, $7)
    on conflict (tenant_id, name) do update
       set version = excluded.version, id = excluded.id, key_id = excluded.key_id, wrapped = excluded.wrapped,
           sealed = excluded.sealed, updated_at = now()
     where secrets.version = excluded.version - 1
returning version

-- :name get
select name, version, created_at, updated_at from secrets where tenant_id = $1 and name = $2

-- :name list
select name, version, created_at, updated_at
  from secrets
 where tenant_id = $1 and ($2::text is null or name > $2)
 order by name
 limit $3

-- :name delete
delete from secrets where tenant_id = $1 and name = $2 returning version

-- :name read
-- What is sealed only of those whose value is not known by its id.
select s.tenant_id, s.name, s.version, s.id::text as id, s.key_id,
       case when s.id is distinct from k.known then s.wrapped end as wrapped,
       case when s.id is distinct from k.known then s.sealed end as sealed
  from unnest($1::int[], $2::text[], $3::uuid[]) as k(tenant_id, name, known)
 cross join lateral (
        select * from secrets s where s.tenant_id = k.tenant_id and s.name = k.name limit 1) s

-- :name stale_secrets
-- Some of those whose key is wrapped with one of these master keys; what somebody else is at is left to them.
select tenant_id, name, version, id::text as id, key_id, wrapped
  from secrets
 where key_id = any($1::text[])
 order by key_id, tenant_id, name
 limit $2
   for no key update skip locked

-- :name rewrap_secrets
update secrets s
   set key_id = n.key_id, wrapped = n.wrapped
  from unnest($1::int[], $2::text[], $3::uuid[], $4::text[], $5::bytea[]) as n(tenant_id, name, id, key_id, wrapped)
 where s.tenant_id = n.tenant_id and s.name = n.name and s.id = n.id

-- :name stale_data_keys
select tenant_id, id, key_id, wrapped
  from data_keys
 where key_id = any($1::text[])
 order by tenant_id, id
 limit $2
   for no key update skip locked

-- :name rewrap_data_keys
update data_keys d
   set key_id = n.key_id, wrapped = n.wrapped
  from unnest($1::int[], $2::int[], $3::text[], $4::bytea[]) as n(tenant_id, id, key_id, wrapped)
 where d.tenant_id = n.tenant_id and d.id = n.id

-- :name usage
-- How many keys each master key wraps.
select key_id, sum(secrets)::int as secrets, sum(data_keys)::int as data_keys
  from (select key_id, count(*) as secrets, 0 as data_keys from secrets group by key_id
         union all
        select key_id, 0, count(*) from data_keys group by key_id) w
 group by key_id
 order by key_id
