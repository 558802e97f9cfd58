-- :name note
-- Before an object is stored: if nobody comes to need it, it is to go, but not while who stores it may still be at it.
insert into payloads (tenant_id, object, look_at) values ($1, $2, now() + interval '2 days')
    on conflict (tenant_id, object) do update set look_at = excluded.look_at

-- :name use
-- Who needs which object. One that a server of the release before has stored is known from now on.
with known as (
    insert into payloads (tenant_id, object, look_at)
    select distinct tenant_id, object, now() + interval '2 days'
      from unnest($1::int[], $2::text[]) as u(tenant_id, object)
     order by 1, 2
        on conflict do nothing
)
insert into payload_uses (tenant_id, object, user_id, day, look_at)
select tenant_id, object, user_id, day, now() + interval '1 day'
  from unnest($1::int[], $2::text[], $3::uuid[], $4::date[]) as u(tenant_id, object, user_id, day)
    -- Servers of the previous release did not record the day of a run that needs its arguments.
    on conflict (tenant_id, object, user_id) do update
   set day = excluded.day where payload_uses.day is null and excluded.day is not null

-- :name older_servers
select exists (select from servers where newest_migration < $1 and seen_at > now() - interval '1 minute')
