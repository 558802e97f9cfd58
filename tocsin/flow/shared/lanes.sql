-- :name pools
select name from pools where name = any($1::text[])

-- :name intern
with new as (
    insert into lanes (pool, kind, function)
    select * from unnest($1::text[], $2::text[], $3::text[])
        on conflict do nothing
    returning id, pool, kind, function
)
select id, pool, kind, function from new
union all
select l.id, l.pool, l.kind, l.function
  from unnest($1::text[], $2::text[], $3::text[]) as k(pool, kind, function)
  join lanes l on l.pool = k.pool and l.kind = k.kind and l.function = k.function and l.labels = '{}'

-- :name all
select id, pool, kind, function, labels from lanes
