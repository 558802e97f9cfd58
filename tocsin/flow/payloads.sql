-- :name is_sensitive
select sensitive from jobs where tenant_id = $1 and id = $2 and state in ('active', 'paused')

-- :name workflows
-- Those of these jobs that are part of workflows, and of which.
select j.tenant_id, j.id::text as id, j.workflow_id::text as workflow_id
  from unnest($1::int[], $2::uuid[]) as k(tenant_id, id)
 cross join lateral (select * from jobs j where j.tenant_id = k.tenant_id and j.id = k.id limit 1) j
 where j.workflow_id is not null

-- :name review_uses
-- Whose time to be looked at has come, up to $1: a run needs its arguments and its result while it is live, dead or in hot
-- history, and for as long as its day is in the archive; a job needs what a document of its names. Those that need nothing
-- any more leave; what they needed is looked at an hour later, when nobody who has read them before can still be making
-- something that needs it, too.
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
           -- Older servers did not say on which day a run was made that needs its arguments. Its id says so, in its first
           -- 48 bits, as milliseconds.
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
-- Up to $1 objects whose time to be looked at has come. What a court or an auditor may ask for stays. Each is put off before
-- somebody tries to delete it: one that storage refuses to delete holds up none of those behind it.
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
-- The object is gone; unless somebody has put it off since ($3).
delete from payloads where tenant_id = $1 and object = $2 and look_at = $3
