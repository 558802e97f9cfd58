-- :name use
with used as (
    select * from unnest($1::int[], $2::uuid[], $3::uuid[], $4::text[]) as u(tenant_id, job_id, circuit_id, name)
),
made as (
    -- One that is there already is not touched: reports wait for its lock.
    insert into circuits (tenant_id, id, name)
    select distinct u.tenant_id, u.circuit_id, u.name
      from used u
     where u.circuit_id is not null
     order by u.tenant_id, u.circuit_id
        on conflict do nothing
)
update jobs j
   set circuit_id = u.circuit_id
  from used u
 cross join lateral (
        select f.ctid as place from jobs f where f.tenant_id = u.tenant_id and f.id = u.job_id limit 1) f
 where j.ctid = f.place

-- :name lock
-- The keys come in order.
select c.tenant_id, c.id::text as id, c.policy, c.state, c.since, c.by_hand, c.recent, c.trips, c.wave, c.sent, c.good,
       c.bad, c.next_at, statement_timestamp() as now
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (
        select * from circuits c where c.tenant_id = k.tenant_id and c.id = k.id limit 1 for no key update) c

-- :name save
update circuits c
   set state = s.state, since = s.since, by_hand = s.by_hand, recent = s.recent, trips = s.trips, wave = s.wave,
       sent = s.sent, good = s.good, bad = s.bad, next_at = s.next_at
  from unnest($1::int[], $2::uuid[], $3::text[], $4::timestamptz[], $5::bool[], $6::text[], $7::int[], $8::int[],
              $9::int[], $10::int[], $11::int[], $12::timestamptz[])
       as s(tenant_id, id, state, since, by_hand, recent, trips, wave, sent, good, bad, next_at)
 cross join lateral (
        select f.ctid as place from circuits f where f.tenant_id = s.tenant_id and f.id = s.id limit 1) f
 where c.ctid = f.place
