-- :name record
insert into audit (tenant_id, actor, key_id, action, target, detail)
select * from unnest($1::int[], $2::text[], $3::uuid[], $4::text[], $5::text[], $6::jsonb[])
