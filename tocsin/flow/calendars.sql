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
select version, document from calendars where tenant_id = $1 and name = $2 for update

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
