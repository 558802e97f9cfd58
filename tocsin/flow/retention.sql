-- :name expire
-- $1: for how many days runs are kept of tenants that do not say. From this commit on nobody reads these files.
update archives a
   set expired_at = now()
  from tenants t
 where t.id = a.tenant_id and not t.legal_hold and a.expired_at is null
   and a.day < (now() at time zone 'UTC')::date - coalesce(t.runs_days, $1)

-- :name expired
-- A hold that came since keeps them, unread.
select a.tenant_id, a.day, a.object
  from archives a
  join tenants t on t.id = a.tenant_id
 where a.expired_at is not null and not t.legal_hold
 order by a.day
 limit $1

-- :name forget
delete from archives where tenant_id = $1 and day = $2 and object = $3 and expired_at is not null

-- :name lock_ended_jobs
-- One-time jobs that ended before their tenant's hot days, or before $1, behind ($2, $3). Whoever makes a run of one
-- holds it.
select j.tenant_id, j.id::text as id
  from jobs j
  join tenants t on t.id = j.tenant_id
 where (j.tenant_id, j.id) > ($2::int, $3::uuid) and j.once and j.state in ('completed', 'cancelled')
   and j.ended_at < coalesce(now() - t.hot_days * interval '1 day', $1)
 order by j.tenant_id, j.id
 limit $4
   for update of j skip locked

-- :name forget_jobs
-- In a statement of its own, which sees what was made before the jobs were locked. What is live, dead or still hot
-- needs its job; what is archived has it with it.
with gone as (
    delete from jobs j
     using unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
     where j.tenant_id = k.tenant_id and j.id = k.id
       and not exists (select from runs r where r.job_id = j.id)
       and not exists (select from dead_letters d where d.tenant_id = j.tenant_id and d.job_id = j.id)
       and not exists (select from history h where h.job_id = j.id)
    returning j.tenant_id, j.id
), versions as (
    delete from job_versions v using gone g where v.tenant_id = g.tenant_id and v.job_id = g.id
)
select count(*) from gone
