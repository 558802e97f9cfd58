-- :name expire
-- One wave: the expired files of the $3 tenants after $2, at most $4. $1: how many days runs are kept for tenants
-- without a setting of their own. No reader uses these files after this commit.
with wave as materialized (
    select t.id, t.legal_hold, coalesce(t.runs_days, $1::int) as days from tenants t where t.id > $2 order by t.id limit $3
), due as materialized (
    select a.place
      from wave t
     cross join lateral (
            select a.ctid as place from archives a
             where a.tenant_id = t.id and a.expired_at is null and a.day < (now() at time zone 'UTC')::date - t.days
             order by a.day
             limit $4) a
     where not t.legal_hold
     limit $4
), gone as (
    update archives a set expired_at = now() from due d where a.ctid = d.place and a.expired_at is null returning 1
)
select (select max(t.id) from wave t) as last, (select count(*)::int from wave) as tenants,
       (select count(*)::int from gone) as files

-- :name expired
-- One wave of $1 files after ($2, $3, $4). `held`: a hold that was set since then keeps the files, unread.
select a.tenant_id, a.day, a.object, coalesce(t.legal_hold, true) as held
  from (select a.tenant_id, a.day, a.object from archives a
         where a.expired_at is not null and (a.tenant_id, a.day, a.object) > ($2::int, $3::date, $4::text)
         order by a.tenant_id, a.day, a.object
         limit $1) a
  left join lateral (select t.legal_hold from tenants t where t.id = a.tenant_id limit 1) t on true
 order by a.tenant_id, a.day, a.object

-- :name forget
delete from archives where tenant_id = $1 and day = $2 and object = $3 and expired_at is not null

-- :name expire_audit
-- One wave: the $3 tenants after $2. $1: how many days the audit is kept for tenants without a setting of their own.
-- Only files before the first one that is kept: a chain has one beginning.
with wave as materialized (
    select t.id, t.legal_hold, coalesce(t.audit_days, $1::int) as days from tenants t where t.id > $2 order by t.id limit $3
), due as materialized (
    select f.place, t.days
      from wave t
     cross join lateral (
            select (now() at time zone 'UTC')::date - t.days as first_day) k
      left join lateral (
            select e.first_seq from audit_archives e
             where e.tenant_id = t.id and e.expired_at is null and (e.gone_at is null or e.last_at >= k.first_day)
             order by e.first_seq
             limit 1) kept on true
     cross join lateral (
            select f.ctid as place from audit_archives f
             where f.tenant_id = t.id and f.expired_at is null
               and f.first_seq < coalesce(kept.first_seq, 9223372036854775807)
             order by f.first_seq
             limit $4) f
     where not t.legal_hold
     limit $4
), gone as (
    update audit_archives f
       set expired_at = now(), expired_days = d.days
      from due d
     where f.ctid = d.place and f.expired_at is null
    returning 1
)
select (select max(t.id) from wave t) as last, (select count(*)::int from wave) as tenants,
       (select count(*)::int from gone) as files

-- :name expired_audit
-- One wave of $1 files after ($2, $3), likewise; `object` is null if it is already deleted.
select f.tenant_id, f.first_seq, f.object, coalesce(t.legal_hold, true) as held
  from (select f.tenant_id, f.first_seq, f.object from audit_archives f
         where f.expired_at is not null and (f.tenant_id, f.first_seq) > ($2::int, $3::bigint)
         order by f.tenant_id, f.first_seq
         limit $1) f
  left join lateral (select t.legal_hold from tenants t where t.id = f.tenant_id limit 1) t on true
 order by f.tenant_id, f.first_seq

-- :name note_audit
-- Its object is gone.
update audit_archives set object = null where tenant_id = $1 and first_seq = $2 and expired_at is not null

-- :name forget_audit
-- Delete all rows without an object of these tenants except the last.
delete from audit_archives f
 where f.tenant_id = any($1::int[]) and f.expired_at is not null and f.object is null
   and exists (select from audit_archives n
                where n.tenant_id = f.tenant_id and n.first_seq > f.first_seq and n.expired_at is not null
                  and n.object is null)

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

-- :name jobs_behind
-- The last of the $3 jobs after ($1, $2); no row if there are fewer.
select j.tenant_id, j.id::text as id
  from jobs j
 where (j.tenant_id, j.id) > ($1::int, $2::uuid)
 order by j.tenant_id, j.id
offset $3 - 1
 limit 1

-- :name lock_ended_jobs
-- One-time jobs after ($2, $3) up to ($6, $7) that ended before their tenant's hot days, or before $1. A transaction
-- that creates a run of such a job holds its lock. A cancelled job may never have run, and then no file has it: it
-- stays for as long as its run would have, $5 days unless its tenant says otherwise, and while it is held.
select j.tenant_id, j.id::text as id
  from jobs j
  join tenants t on t.id = j.tenant_id
 where (j.tenant_id, j.id) > ($2::int, $3::uuid) and (j.tenant_id, j.id) <= ($6::int, $7::uuid) and j.once and j.state in ('completed', 'cancelled')
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
