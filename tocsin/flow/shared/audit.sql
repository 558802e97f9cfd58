-- :name record
insert into audit (tenant_id, actor, key_id, action, target, detail, before, after, address, request_id)
select * from unnest($1::int[], $2::text[], $3::uuid[], $4::text[], $5::text[], $6::jsonb[], $7::bytea[], $8::bytea[],
                     $9::text[], $10::text[])

-- :name said
       a.id, (extract(epoch from a.at) * 1000000)::bigint as micros, a.actor, a.key_id::text as key_id, a.action,
       a.target, a.detail::text as detail, a.before, a.after, a.address, a.request_id
