-- :name used
-- How many open jobs and how many runs that have not started a tenant has, each counted up to a limit.
--   $1 tenant  $2 jobs at most  $3 runs at most
select (select count(*)
          from (select from jobs j where j.tenant_id = $1 and j.state in ('active', 'paused') limit $2) j)::int as jobs,
       (select count(*)
          from (select from runs r
                 where r.tenant_id = $1 and r.state in ('staged', 'ready', 'waiting') limit $3) r)::int as queued

-- :name known
select true from idempotency where tenant_id = $1 and key = $2
