-- :name known_keys
select i.tenant_id, i.key, i.digest, i.status, i.ids::text[] as ids, i.version
  from unnest($1::int[], $2::text[]) as k(tenant_id, key)
 cross join lateral (
        select * from idempotency i where i.tenant_id = k.tenant_id and i.key = k.key limit 1) i

-- :name new_keys
insert into idempotency (tenant_id, key, digest, status, ids, version)
select tenant_id, key, digest, status, ids::uuid[], 1
  from unnest($1::int[], $2::text[], $3::bytea[], $4::int[], $5::text[]) as n(tenant_id, key, digest, status, ids)
    on conflict do nothing
returning ids[1]::text as first_id

-- :name drop_keys
delete from idempotency i
 using unnest($1::int[], $2::text[]) as k(tenant_id, key)
 cross join lateral (
        select f.ctid as place from idempotency f where f.tenant_id = k.tenant_id and f.key = k.key limit 1) f
 where i.ctid = f.place

-- :name store
-- Everything that a new job is, from one reading of the arrays; a name that an open job has stops it all.
with new as (
    select *
      from unnest($1::int[], $2::uuid[], $3::text[], $4::text[], $5::int[], $6::bool[], $7::text[], $8::int[],
                  $9::int[], $10::int[], $11::interval[], $12::jsonb[], $13::text[], $14::uuid[], $15::text[],
                  $16::int[], $17::interval[], $18::int[], $19::timestamptz[], $20::text[], $21::uuid[], $22::text[],
                  $23::bytea[], $24::text[], $25::text[])
           as n(tenant_id, id, name, spec, lane_id, once, overlap, max_concurrency, max_attempts, priority,
                start_deadline, tags, zone_rules, key_id, key_template, key_max, rate_gap, rate_burst, next_fire_at,
                actor, actor_key_id, schedule, digest, address, request_id)
), kept as (
    insert into jobs (tenant_id, id, name, spec, lane_id, once, overlap, max_concurrency, max_attempts, priority,
                      start_deadline, tags, zone_rules, key_id, key_template, key_max, rate_gap, rate_burst,
                      created_at, updated_at, schedule)
    select tenant_id, id, name, spec, lane_id, once, overlap, max_concurrency, max_attempts, priority,
           start_deadline, tags, zone_rules, key_id, key_template, key_max, rate_gap, rate_burst,
           $26::timestamptz, $26::timestamptz, schedule
      from new
), limited as (
    insert into limits (tenant_id, key, max)
    select tenant_id, id, coalesce(max_concurrency, 2147483647)
      from new
     where max_concurrency is not null or key_id is not null or rate_gap is not null
), planned as (
    insert into triggers (tenant_id, job_id, next_fire_at)
    select tenant_id, id, next_fire_at from new where next_fire_at is not null
)
insert into audit (tenant_id, actor, key_id, action, target, after, address, request_id)
select tenant_id, actor, actor_key_id, 'job.create', 'job:' || id, digest, address, request_id
  from new
 where actor is not null

-- :name mark_sensitive
update jobs j
   set sensitive = true
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (
        select f.ctid as place from jobs f where f.tenant_id = k.tenant_id and f.id = k.id limit 1) f
 where j.ctid = f.place

-- :name names_taken
select n.i
  from unnest($1::int[], $2::text[], $3::text[], $4::int[]) as n(tenant_id, name, key, i)
 cross join lateral (
        select from jobs j
         where j.tenant_id = n.tenant_id and j.name = n.name and j.state in ('active', 'paused') limit 1) j
  left join lateral (
        select true as known from idempotency i where i.tenant_id = n.tenant_id and i.key = n.key limit 1) i on true
 where i.known is null

-- :name open_jobs
-- Whoever submits a run holds its job, so that a cancel sees either the run or no run.
select j.tenant_id, j.id::text as id, j.state, j.name, j.version, j.priority, j.max_attempts, j.tags::text as tags,
       j.key_template, j.sensitive, j.node
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (
        select * from jobs j where j.tenant_id = k.tenant_id and j.id = k.id limit 1 for share) j
