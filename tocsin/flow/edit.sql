-- :name lock_job
select id::text as id, state, version, name, spec, max_concurrency, tenant_id, joins, node,
       coalesce(anchored_at, created_at) as anchor
  from jobs
 where tenant_id = $1 and id = $2
   for no key update

-- :name lock_named
-- The open job of a name; there is one at most.
select id::text as id, state, version, name, spec, max_concurrency, tenant_id, joins, node,
       coalesce(anchored_at, created_at) as anchor
  from jobs
 where tenant_id = $1 and name = $2 and state in ('active', 'paused')
   for no key update

-- :name same
-- As PostgreSQL writes them: 1 is not 1.0 and not true, but neither the order of keys nor blanks matter.
select $1::jsonb::text = $2::jsonb::text

-- :name keep_version
-- $3 up to when its schedule owed, $4 after when the new one does; null if both owe the same.
insert into job_versions (tenant_id, job_id, version, spec, anchor, owed_until, successor_after)
select tenant_id, id, version, spec::jsonb, coalesce(anchored_at, created_at), $3, $4
  from jobs
 where tenant_id = $1 and id = $2

-- :name set_job
update jobs
   set version = version + 1, updated_at = now(), spec = $3, name = $4, lane_id = $5, once = $6, overlap = $7,
       max_concurrency = $8, max_attempts = $9, priority = $10, start_deadline = $11, tags = $12::jsonb,
       zone_rules = $13, key_id = $14, key_template = $15, key_max = $16, rate_gap = $17, rate_burst = $18,
       anchored_at = coalesce($19, anchored_at), schedule = $20
 where tenant_id = $1 and id = $2
returning version

-- :name set_sensitive
update jobs set sensitive = $3 where tenant_id = $1 and id = $2

-- :name set_limit
insert into limits (tenant_id, key, max) values ($1, $2, $3)
    on conflict (tenant_id, key) do update set max = excluded.max

-- :name no_longer_once
-- What still runs of a one-time job that got another time does not complete it.
with locked as materialized (
    select r.ctid as place from runs r where r.tenant_id = $1 and r.job_id = $2 and r.once order by r.id for update
)
update runs r set once = false from locked l where r.ctid = l.place

-- :name versions
-- Newest first: the present one, then those that were replaced.
select v.version, v.spec, v.replaced_at
  from (select j.version, j.spec, null::timestamptz as replaced_at from jobs j where j.tenant_id = $1 and j.id = $2
        union all
        select v.version, v.spec::text, v.replaced_at from job_versions v where v.tenant_id = $1 and v.job_id = $2) v
 where $3::int is null or v.version < $3
 order by v.version desc
 limit $4

-- :name replaced
select job_id::text as id, spec::text as spec from job_versions
 where tenant_id = $1 and job_id = any($2::uuid[]) and version = $3
