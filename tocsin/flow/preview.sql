-- :name sharing
-- How many of a tenant's cursors stand in a minute, of the first $4 that anybody has there: bounded, whoever else fires.
select count(*) filter (where t.tenant_id = $1)
  from (select t.tenant_id from triggers t where t.next_fire_at >= $2 and t.next_fire_at < $3
           and t.kept_until is null and t.waits_for is null limit $4) t
