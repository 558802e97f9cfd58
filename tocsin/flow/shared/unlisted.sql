-- :name segments
select s.object, s.position, s.bytes
  from log_segments s
 where s.tenant_id = $1 and s.last_run >= $2::uuid and s.first_run <= $2::uuid
   and s.last_run is not null and s.replaced_at is null
 order by s.id
