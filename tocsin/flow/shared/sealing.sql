-- :name known_secrets
select k.tenant_id, k.name
  from unnest($1::int[], $2::text[]) as k(tenant_id, name)
 cross join lateral (
        select from secrets s where s.tenant_id = k.tenant_id and s.name = k.name limit 1) s

-- :name data_key
select k.tenant_id, d.id, d.key_id, d.wrapped
  from unnest($1::int[], $2::int[]) as k(tenant_id, id)
 cross join lateral (
        select * from data_keys d where d.tenant_id = k.tenant_id and d.id = k.id limit 1) d

-- :name add_data_key
insert into data_keys (tenant_id, id, key_id, wrapped) values ($1, $2, $3, $4) on conflict do nothing
