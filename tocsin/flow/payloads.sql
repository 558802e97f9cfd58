-- :name is_sensitive
select sensitive from jobs where tenant_id = $1 and id = $2 and state in ('active', 'paused')

-- :name workflows
-- Those of these jobs that are part of workflows, and of which.
select j.tenant_id, j.id::text as id, j.workflow_id::text as workflow_id
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (select * from jobs j where j.tenant_id = k.tenant_id and j.id = k.id limit 1) j
 where j.workflow_id is not null

-- :name review_uses
-- Up to $1 uses that are due for a check. A run needs its arguments and its result while it is live, dead or in hot
-- history, and while its day is in the archive. A job needs the objects that its documents name. Uses that are over are
-- deleted. Their objects are checked an hour later, when no transaction that has read these rows can still create
-- something that needs the objects.
with due as materialized (
    select u.ctid as place, u.tenant_id, u.object, u.user_id, u.day, right(u.object, 64) as sha256
      from payload_uses u
     where u.look_at < now()
     order by u.look_at
     limit $1
       for update skip locked
), found as materialized (
    select d.*,
           exists (select from runs r where r.tenant_id = d.tenant_id and r.id = d.user_id)
        or exists (select from dead_letters l where l.tenant_id = d.tenant_id and l.run_id = d.user_id)
        or exists (select from history h where h.tenant_id = d.tenant_id and h.run_id = d.user_id) as is_run
      from due d
), judged as materialized (
    select d.*,
           d.is_run
        or exists (select from archives a where a.tenant_id = d.tenant_id and a.day = d.day and a.expired_at is null)
        or exists (select from jobs j
                    where j.tenant_id = d.tenant_id and j.id = d.user_id and strpos(j.spec, d.sha256) > 0)
        or exists (select from job_versions v
                    where v.tenant_id = d.tenant_id and v.job_id = d.user_id and strpos(v.spec::text, d.sha256) > 0)
           as needed
      from found d
), kept as (
    update payload_uses u
       set look_at = now() + interval '1 day',
           -- Older servers did not record the day of a run that needs its arguments. The first 48 bits of the run's id
           -- are that instant in milliseconds.
           day = case when j.is_run
                      then coalesce(u.day, (to_timestamp(('x' || translate(left(u.user_id::text, 13), '-', ''))::bit(48)
                                                         ::bigint / 1000.0) at time zone 'UTC')::date)
                      else u.day end
      from judged j
     where j.needed and u.ctid = j.place
), left_behind as (
    delete from payload_uses u using judged j where not j.needed and u.ctid = j.place
    returning u.tenant_id, u.object
), later as (
    update payloads p
       set look_at = greatest(p.look_at, now() + interval '1 hour')
      from (select distinct tenant_id, object from left_behind) l
     cross join lateral (
            select f.ctid as place from payloads f where f.tenant_id = l.tenant_id and f.object = l.object limit 1) f
     where p.ctid = f.place
)
select count(*) from judged

-- :name due
-- Up to $1 objects that are due for a check. Objects under a legal hold stay. Each object is put off before its
-- deletion is tried: one that storage refuses to delete does not delay those behind it.
with due as materialized (
    select p.ctid as place,
           exists (select from payload_uses u where u.tenant_id = p.tenant_id and u.object = p.object)
           or coalesce((select t.legal_hold from tenants t where t.id = p.tenant_id), false) as needed
      from payloads p
     where p.look_at < now()
     order by p.look_at
     limit $1
       for update of p skip locked
)
update payloads p
   set look_at = now() + case when d.needed then interval '1 day' else interval '1 hour' end
  from due d
 where p.ctid = d.place
returning p.tenant_id, p.object, p.look_at, d.needed

-- :name forget
-- The object is deleted. Keep the row if another transaction has put it off since ($3).
delete from payloads where tenant_id = $1 and object = $2 and look_at = $3
