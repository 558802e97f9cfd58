-- :name used
-- How many open jobs and how many runs that have not started a tenant has, each counted up to a limit.
--   $1 tenant  $2 jobs at most  $3 runs at most
select (select count(*)
          from (select from jobs j where j.tenant_id = $1 and j.state in ('active', 'paused') limit $2) j)::int as jobs,
       (select count(*)
          from (select from runs r
                 where r.tenant_id = $1 and r.state in ('staged', 'ready', 'waiting') limit $3) r)::int as queued

-- :name usage
-- The same for people, and what runs and was logged today.
select (select count(*)
          from (select from jobs j where j.tenant_id = $1 and j.state in ('active', 'paused') limit $2) j)::int as jobs,
       r.queued, r.running, coalesce(l.bytes, 0) as log_bytes_today
  from (select count(*) filter (where r.state in ('staged', 'ready', 'waiting'))::int as queued,
               count(*) filter (where r.state in ('running', 'stopping'))::int as running
          from (select r.state from runs r where r.tenant_id = $1 limit $2) r) r
  left join lateral (
        select u.bytes from log_usage u
         where u.tenant_id = $1 and u.day = (now() at time zone 'UTC')::date
         limit 1) l on true

-- :name known
select true from idempotency where tenant_id = $1 and key = $2
