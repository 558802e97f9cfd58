-- :name read
-- The calendars of these names; the document only where another than the known one is there.
select k.tenant_id, k.name, c.version, c.digest, case when c.digest is distinct from k.known then c.document end as document
  from unnest($1::int[], $2::text[], $3::text[]) as k(tenant_id, name, known)
 cross join lateral (select * from calendars c where c.tenant_id = k.tenant_id and c.name = k.name limit 1) c

-- :name use
-- Whoever goes by a calendar holds it, so that it is not deleted meanwhile.
insert into calendar_uses (tenant_id, job_id, calendar, version)
select u.tenant_id, u.job_id, c.name, u.version
  from unnest($1::int[], $2::uuid[], $3::text[], $4::int[]) as u(tenant_id, job_id, calendar, version)
 cross join lateral (
        select c.name from calendars c
         where c.tenant_id = u.tenant_id and c.name = u.calendar
         limit 1
           for key share) c
    on conflict (tenant_id, job_id) do update
       set calendar = excluded.calendar, version = excluded.version, since = now()
returning job_id

-- :name leave
delete from calendar_uses where tenant_id = $1 and job_id = $2
