-- :name files
-- $1 tenants  $2 from  $3 to (days, both included). The newest day first. Only days whose files are complete are read.
select a.tenant_id, a.day, a.object, a.bytes, a.checksum, a.rows
  from unnest($1::int[]) as t(id)
 cross join lateral (
        select a.* from archives a where a.tenant_id = t.id and a.day >= $2 and a.day <= $3 and a.expired_at is null) a
  join archived_days d on d.day = a.day
 order by a.day desc, a.object

-- :name between
-- Days whose files are read while their partitions are still there: whoever counts must not count them twice.
select day from archived_days where gone_at is null
