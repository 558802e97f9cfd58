-- :name ids
select t.id, t.slug
  from unnest($1::text[]) as w(slug)
 cross join lateral (select * from tenants t where t.slug = w.slug limit 1) t

-- :name slugs
select t.id, t.slug
  from unnest($1::int[]) as w(id)
 cross join lateral (select * from tenants t where t.id = w.id limit 1) t
