-- :name behind_calendars
-- Jobs whose cursors were set by an older version of their calendar.
select u.tenant_id, u.job_id::text as job_id
  from calendars c
 cross join lateral (
        select u.tenant_id, u.job_id from calendar_uses u
         where u.tenant_id = c.tenant_id and u.calendar = c.name and u.version < c.version
         order by u.version
         limit $1) u
 limit $1

-- :name zone_rules
-- All rules that open jobs' cursors were set by, skipping from one to the next in the index.
with recursive known as (
    (select j.zone_rules from jobs j
      where j.zone_rules is not null and j.state in ('active', 'paused')
      order by j.zone_rules limit 1)
    union all
    select n.zone_rules
      from known k
     cross join lateral (
            select j.zone_rules from jobs j
             where j.zone_rules > k.zone_rules and j.state in ('active', 'paused')
             order by j.zone_rules limit 1) n
)
select zone_rules from known

-- :name behind_zones
select j.tenant_id, j.id::text as job_id
  from unnest($2::text[]) as k(zone_rules)
 cross join lateral (
        select j.tenant_id, j.id from jobs j
         where j.zone_rules = k.zone_rules and j.state in ('active', 'paused')
         limit $1) j
 limit $1

-- :name lock_job
select j.state, j.once, j.name, j.schedule, coalesce(j.anchored_at, j.created_at) as anchor, n.slug as tenant,
       now() as now
  from jobs j
 cross join lateral (select * from tenants n where n.id = j.tenant_id limit 1) n
 where j.tenant_id = $1 and j.id = $2
   for no key update of j

-- :name set_zone_rules
update jobs set zone_rules = $3 where tenant_id = $1 and id = $2
