-- :name lock
select t.next_fire_at, t.held_at from triggers t where t.tenant_id = $1 and t.job_id = $2 for no key update

-- :name put
-- The job's lock ensures one row per job. A cursor that does not move keeps its `unplanned_since`.
with there as (
    update triggers t
       set next_fire_at = $3, held_at = $4, waits_for = null, kept_until = null,
           unplanned_since = case when $3 = t.next_fire_at then t.unplanned_since else $5 end
     where t.tenant_id = $1 and t.job_id = $2
    returning t.job_id
)
insert into triggers (tenant_id, job_id, next_fire_at, held_at, unplanned_since)
select $1, $2, $3, $4, $5 where not exists (select from there)

-- :name count
insert into run_counts (tenant_id, job_id)
select tenant_id, job_id from unnest($1::int[], $2::uuid[]) as n(tenant_id, job_id)
    on conflict do nothing

-- :name stop_counting
delete from run_counts where tenant_id = $1 and job_id = $2

-- :name counts
select c.tenant_id, c.job_id::text as job_id, c.used, c.parked
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, job_id)
 cross join lateral (
        select * from run_counts c where c.tenant_id = k.tenant_id and c.job_id = k.job_id limit 1) c

-- :name use
update run_counts c
   set used = c.used + n.more, parked = n.parked
  from unnest($1::int[], $2::uuid[], $3::int[], $4::timestamptz[]) as n(tenant_id, job_id, more, parked)
 cross join lateral (
        select f.ctid as place from run_counts f where f.tenant_id = n.tenant_id and f.job_id = n.job_id limit 1) f
 where c.ctid = f.place
