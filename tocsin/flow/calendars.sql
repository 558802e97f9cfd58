-- :name lock
select version, document from calendars where tenant_id = $1 and name = $2 for no key update

-- :name put
insert into calendars (tenant_id, name, document, digest) values ($1, $2, $3, $4)
    on conflict (tenant_id, name) do update
       set document = excluded.document, digest = excluded.digest, version = calendars.version + 1, updated_at = now()
returning version

-- :name get
select name, version, document, created_at, updated_at from calendars where tenant_id = $1 and name = $2

-- :name list
select name, version, document, created_at, updated_at
  from calendars
 where tenant_id = $1 and ($2::text is null or name > $2)
 order by name
 limit $3

-- :name lock_for_delete
-- Excludes those who are about to go by it: they hold its key.
select version from calendars where tenant_id = $1 and name = $2 for update

-- :name in_use
-- An open job that goes by it.
select coalesce(j.name, j.id::text) as job
  from calendar_uses u
  join jobs j on j.tenant_id = u.tenant_id and j.id = u.job_id
 where u.tenant_id = $1 and u.calendar = $2 and j.state in ('active', 'paused')
 limit 1

-- :name forget_uses
-- What is left are jobs that have ended.
delete from calendar_uses where tenant_id = $1 and calendar = $2

-- :name delete
delete from calendars where tenant_id = $1 and name = $2

-- :name behind
-- Jobs whose cursors were set by an older version of their calendar.
select u.tenant_id, u.job_id::text as job_id
  from calendars c
 cross join lateral (
        select u.tenant_id, u.job_id from calendar_uses u
         where u.tenant_id = c.tenant_id and u.calendar = c.name and u.version < c.version
         order by u.version
         limit $1) u
 limit $1

-- :name lock_job
select j.state, j.once, j.name, j.schedule, coalesce(j.anchored_at, j.created_at) as anchor, n.slug as tenant
  from jobs j
 cross join lateral (select * from tenants n where n.id = j.tenant_id limit 1) n
 where j.tenant_id = $1 and j.id = $2
   for no key update of j

-- :name lock_trigger
select next_fire_at, held_at from triggers where tenant_id = $1 and job_id = $2 for no key update

-- :name after
-- Behind this instant the changed calendar counts: now, or the last occurrence that somebody holds.
select statement_timestamp() as now, greatest(statement_timestamp(), max(r.scheduled_for)) as after
  from runs r
 where r.tenant_id = $1 and r.job_id = $2 and r.trigger = 'schedule'

-- :name set_trigger
insert into triggers (tenant_id, job_id, next_fire_at, held_at) values ($1, $2, $3, $4)
    on conflict (tenant_id, job_id) do update set next_fire_at = excluded.next_fire_at, held_at = excluded.held_at
