-- :name due
-- Cursors that fall due within the horizon. A row that another planner holds is its business.
select t.tenant_id, t.job_id::text as job_id, t.next_fire_at, j.version, j.created_at,
       (j.spec -> 'schedule')::text as schedule, now() as now
  from triggers t
  join jobs j on j.tenant_id = t.tenant_id and j.id = t.job_id
 where t.next_fire_at <= now() + $1::interval
 order by t.next_fire_at
 limit $2
   for no key update of t skip locked

-- :name advance
-- Compare-and-set: an occurrence is materialised once, whoever plans and whatever their clocks.
update triggers t
   set next_fire_at = n.next
  from unnest($1::int[], $2::uuid[], $3::timestamptz[], $4::timestamptz[]) as n(tenant_id, job_id, was, next)
 where t.tenant_id = n.tenant_id and t.job_id = n.job_id and t.next_fire_at = n.was
returning t.job_id::text as job_id

-- :name next_due
select min(next_fire_at) from triggers where next_fire_at is not null
