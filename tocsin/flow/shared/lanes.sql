-- :name pools
select name from pools where name = any($1::text[])

-- :name intern
-- Create lanes or take them back into use, and return them. A tenant that has created $8 lanes gets no more.
--   $1 pool  $2 kind  $3 function  $4 labels  $5 needs  $6 prefer  $7 the tenant that asks, or null
with wanted as (
    select pool, kind, function, labels::jsonb, needs::int[], prefer::jsonb, made_by
      from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::int[])
           as k(pool, kind, function, labels, needs, prefer, made_by)
),
there as (
    select l.*
      from wanted k
      join lanes l on l.pool = k.pool and l.kind = k.kind and l.function = k.function and l.labels = k.labels
           and l.needs = k.needs and l.prefer = k.prefer
),
unmade as (
    select k.*, row_number() over (partition by k.made_by)
                + (select count(*) from lanes m where m.made_by = k.made_by) as number
      from wanted k
     where not exists (select from there t
                        where t.pool = k.pool and t.kind = k.kind and t.function = k.function and t.labels = k.labels
                          and t.needs = k.needs and t.prefer = k.prefer)
),
new as (
    insert into lanes (pool, kind, function, labels, needs, prefer, made_by)
    -- In one order on every node: two nodes that create the same lanes wait for each other, but never in a circle.
    select w.* from (
        select u.pool, u.kind, u.function, u.labels, u.needs, u.prefer, u.made_by from unmade u
         where u.made_by is null or u.number <= $8
        union all
        select t.pool, t.kind, t.function, t.labels, t.needs, t.prefer, t.made_by from there t
         where t.retired_at is not null) w
     order by 1, 2, 3, 4, 5, 6
        on conflict (pool, kind, function, labels, needs, prefer) do update
       set retired_at = null
     where lanes.retired_at is not null
    returning *
)
select id, pool, kind, function, labels::text as labels, needs, prefer::text as prefer, false as retired from new
union all
select id, pool, kind, function, labels::text, needs, prefer::text, false from there where retired_at is null

-- :name changed
-- Lanes that were created, retired or taken back into use since the snapshot whose oldest open transaction was $1; and
-- the oldest open transaction of this snapshot, in at least one row.
select pg_snapshot_xmin(pg_current_snapshot())::text as upto,
       l.id, l.pool, l.kind, l.function, l.labels::text as labels, l.needs, l.prefer::text as prefer,
       l.retired_at is not null as retired
  from (values (1)) as one(n)
  left join lanes l on l.changed >= $1::text::xid8

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
