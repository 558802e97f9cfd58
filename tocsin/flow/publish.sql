-- Run as the owner, one server at a time.

-- :name tenants
-- All: one that has no files any more may have a table that names some. But for those that are erased, whose tables go.
select t.id, now() as at
  from tenants t
 where not exists (select from erasures e where e.tenant_id = t.id)
 order by t.id
