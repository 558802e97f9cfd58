-- :name pools
select name from pools where name = any($1::text[])

-- :name intern
with wanted as (
    select pool, kind, function, labels::jsonb, needs::int[], prefer::jsonb
      from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[])
           as k(pool, kind, function, labels, needs, prefer)
),
new as (
    insert into lanes (pool, kind, function, labels, needs, prefer)
    select * from wanted
        on conflict (pool, kind, function, labels, needs, prefer) do update
       set retired_at = null
     where lanes.retired_at is not null
    returning *
)
select id, pool, kind, function, labels::text as labels, needs, prefer::text as prefer, false as retired from new
union all
select l.id, l.pool, l.kind, l.function, l.labels::text, l.needs, l.prefer::text, false
  from wanted k
  join lanes l on l.pool = k.pool and l.kind = k.kind and l.function = k.function and l.labels = k.labels
       and l.needs = k.needs and l.prefer = k.prefer

-- :name all
select id, pool, kind, function, labels::text as labels, needs, prefer::text as prefer, retired_at is not null as retired
  from lanes

-- :name closed
-- Pools that are not open to every tenant.
select name, tenants from pools where tenants is not null

-- :name retired
select id from lanes where retired_at is not null

-- :name totals
-- What the living workers have that may take from a lane.
select distinct w.resources
  from lanes l
  join workers w on w.pool = l.pool and l.kind = any(w.targets) and (l.kind <> 'python' or l.function = any(w.functions))
       and w.labels @> l.labels
 where l.id = $1 and w.state = 'live' and w.lease_until > now()
