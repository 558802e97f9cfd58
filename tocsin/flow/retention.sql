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

-- :name expire_audit
-- $1: for how many days the audit is kept of tenants that do not say. Only what comes before all that is kept: a chain has
-- one beginning.
update audit_archives f
   set expired_at = now(), expired_days = coalesce(t.audit_days, $1)
  from tenants t
 where t.id = f.tenant_id and not t.legal_hold and f.expired_at is null and f.gone_at is not null
   and f.last_at < (now() at time zone 'UTC')::date - coalesce(t.audit_days, $1)
   and not exists (select from audit_archives e
                    where e.tenant_id = f.tenant_id and e.first_seq < f.first_seq
                      and (e.gone_at is null or e.last_at >= (now() at time zone 'UTC')::date - coalesce(t.audit_days, $1)))

-- :name expired_audit
-- A hold that came since keeps them, unread.
select f.tenant_id, f.first_seq, f.object
  from audit_archives f
  join tenants t on t.id = f.tenant_id
 where f.expired_at is not null and f.object is not null and not t.legal_hold
 order by f.tenant_id, f.first_seq
 limit $1

-- :name note_audit
-- Its object is gone.
update audit_archives set object = null where tenant_id = $1 and first_seq = $2 and expired_at is not null

-- :name forget_audit
-- All that are gone but the last.
delete from audit_archives f
 where f.object is null
   and exists (select from audit_archives n
                where n.tenant_id = f.tenant_id and n.first_seq > f.first_seq and n.object is null)

-- :name logs_kept
select t.id, coalesce(t.logs_days, $1)::int as days from tenants t where not t.legal_hold order by t.id

-- :name with_old_logs
-- Those who have segments that are older than they keep any.
select w.id, w.first::text as first
  from unnest($1::int[], $2::uuid[]) as w(id, first)
 cross join lateral (
        select from log_segments s
         where s.tenant_id = w.id and s.id < w.first and s.replaced_at is null
         limit 1) s

-- :name expire_segments
-- The oldest before $2, with $3 lines or one segment more. Nobody searches them from now on.
with oldest as materialized (
    select s.id, sum(s.lines) over (order by s.id) - s.lines as before
      from (select s.id, s.lines from log_segments s
             where s.tenant_id = $1 and s.id < $2::uuid and s.replaced_at is null
             order by s.id
             limit 1000) s
)
update log_segments s
   set replaced_at = now()
  from oldest o
 where s.tenant_id = $1 and s.id = o.id and o.before < $3 and s.replaced_at is null
returning s.id::text as id, s.object

-- :name forget_lines
-- Of runs that were made before $2, which is later than what lies in these objects.
delete from log_chunks c where c.tenant_id = $1 and c.run_id < $2::uuid and c.object = any($3::text[])

-- :name leave_objects
-- Not at once: somebody may be reading.
insert into log_garbage (object, due_at)
select distinct o, now() + interval '1 hour' from unnest($1::text[]) as o
    on conflict (object) do nothing

-- :name lock_ended_jobs
-- One-time jobs that ended before their tenant's hot days, or before $1, behind ($2, $3). Whoever makes a run of one
-- holds it. One that was cancelled may never have run, and then no file has it: it stays for as long as its run would
-- have, $5 days unless its tenant says otherwise, and while it is held.
select j.tenant_id, j.id::text as id
  from jobs j
  join tenants t on t.id = j.tenant_id
 where (j.tenant_id, j.id) > ($2::int, $3::uuid) and j.once and j.state in ('completed', 'cancelled')
   and j.ended_at < coalesce(now() - t.hot_days * interval '1 day', $1)
   and (j.state = 'completed'
        or (not t.legal_hold and j.ended_at < now() - coalesce(t.runs_days, $5) * interval '1 day'))
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
       -- Whoever depends on it is to be told what became of it.
       and not exists (select from dependencies d
                        where (d.parent_id, d.tenant_id) between (j.id, j.tenant_id) and (j.id, j.tenant_id))
    returning j.tenant_id, j.id
), versions as (
    delete from job_versions v using gone g where v.tenant_id = g.tenant_id and v.job_id = g.id
)
select count(*) from gone
