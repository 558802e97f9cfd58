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

-- :name complete_missed
-- One-time jobs that get no run any more. Whoever holds the job may want its trigger, which we hold: then this turn
-- fails at once and the next one does it, instead of waiting in a circle.
with missed as materialized (
    select j.tenant_id, j.id
      from jobs j
     where (j.tenant_id, j.id) in (select * from unnest($1::int[], $2::uuid[]))
       and j.once and j.state in ('active', 'paused')
     order by j.id
       for no key update nowait
)
update jobs j
   set state = 'completed', ended_at = now(), updated_at = now()
  from missed m
 where j.tenant_id = m.tenant_id and j.id = m.id

-- :name next_due
select min(next_fire_at) from triggers where next_fire_at is not null
