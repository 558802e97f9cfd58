-- Run as the owner, one archivist at a time. What reads files runs in DuckDB.

-- :name days
-- Tables of days of which some tenant need not keep its rows here, attached or not: that which is being detached first,
-- for no other can be meanwhile, then the oldest. $1: the first day that tenants keep who do not say.
select c.relname::text as name, to_date(right(c.relname, 8), 'YYYYMMDD') as day, i.inhrelid is not null as attached,
       coalesce(i.inhdetachpending, false) as pending, d.day is not null as archived
  from pg_class c
  left join pg_inherits i on i.inhrelid = c.oid
  left join archived_days d on d.day = to_date(right(c.relname, 8), 'YYYYMMDD')
 where c.relnamespace = 'tocsin'::regnamespace and c.relkind = 'r' and c.relname ~ '^history_[0-9]{8}$'
   and to_date(right(c.relname, 8), 'YYYYMMDD')
       < (select greatest($1::date, (now() at time zone 'UTC')::date - min(t.hot_days)) from tenants t)
 order by pending desc, c.relname

-- :name tenants
-- Who has rows of a day here, or runs whose rows are still to come; and since when their time with it is over (if it is).
--   $1 $2 its bounds  $3 the day  $4 the first day that those keep who do not say
select t.id, r.found as live,
       case when k.days > 0 then date_trunc('day', now(), 'UTC') - (k.days - 1) * interval '1 day' end as due
  from tenants t
  left join lateral (
        select true as found from history h
         where h.tenant_id = t.id and h.run_id >= $1::uuid and h.run_id < $2::uuid limit 1) h on true
 cross join lateral (
        select exists (select from runs r where r.tenant_id = t.id and r.id >= $1::uuid and r.id < $2::uuid) as found) r
 cross join lateral (
        select coalesce((now() at time zone 'UTC')::date - t.hot_days, $4::date) - $3::date as days) k
 where h.found or r.found
 order by t.id

-- :name older_servers
select exists (select from servers where newest_migration < '0044' and seen_at > now() - interval '1 minute')

-- :name slice_end
-- Where a slice of $4 rows or $5 bytes ends that begins at $2, null if the day is over before: a run is in one slice.
select p.run_id::text
  from (select h.run_id, row_number() over in_order as row,
               sum(200 + coalesce(pg_column_size(h.error), 0) + coalesce(pg_column_size(h.usage), 0)
                   + coalesce(pg_column_size(h.result), 0) + coalesce(pg_column_size(h.args), 0)
                   + coalesce(pg_column_size(h.tags), 0) + coalesce(j.bytes, 0)) over in_order as bytes
          from history h
          left join lateral (
                select pg_column_size(j.spec) as bytes from jobs j
                 where j.tenant_id = h.tenant_id and j.id = h.job_id and j.once limit 1) j on true
         where h.tenant_id = $1 and h.run_id >= $2::uuid and h.run_id < $3::uuid
        window in_order as (order by h.run_id, h.attempt rows unbounded preceding)) p
 where (p.row > $4 or p.bytes > $5) and p.run_id > $2::uuid
 limit 1

-- :name rows
-- Of a slice from $2 to $3, in the order of COLUMNS. What is known of the job is written beside the run, for the job may
-- go: its document beside the first run of each version, unless the file, which begins at $4, has it: then the version is
-- that of the job's last run before the slice. (`+ 0`: found by the job, not by walking through the tenant's runs.)
with first as materialized (
    select distinct on (h.job_id, h.job_version) h.job_id, h.job_version, h.run_id, h.attempt
      from history h
     where h.tenant_id = $1::int and h.run_id >= $2::uuid and h.run_id < $3::uuid
     order by h.job_id, h.job_version, h.run_id, h.attempt
), new as materialized (
    select f.run_id, f.attempt
      from first f
      left join lateral (
            select e.job_version from history e
             where e.tenant_id + 0 = $1::int and e.job_id = f.job_id and e.run_id >= $4::uuid and e.run_id < $2::uuid
             order by e.run_id desc
             limit 1) e on true
     where e.job_version is distinct from f.job_version
)
select h.tenant_id, h.run_id, h.attempt, h.job_id, j.name, j.pool, h.job_version, h.final, h.state, h.outcome, h.reason,
       h.count, h.fence, h.trigger, h.priority, h.failures, h.losses, h.max_attempts, h.first_for at time zone 'UTC',
       h.scheduled_for at time zone 'UTC', h.ready_at at time zone 'UTC', h.started_at at time zone 'UTC',
       h.finished_at at time zone 'UTC', h.worker_id, h.exit_code, h.error_class, h.error, h.usage, h.result, h.args,
       h.tags::text, h.origin_run_id,
       case when n.run_id is null then null
            when j.version = h.job_version then j.spec
            else (select v.spec::text from job_versions v
                   where v.tenant_id = h.tenant_id and v.job_id = h.job_id and v.version = h.job_version) end,
       h.logical_at at time zone 'UTC', h.workflow_run_id
  from history h
  left join new n on n.run_id = h.run_id and n.attempt = h.attempt
  left join lateral (
        select j.name, j.version, j.spec, l.pool from jobs j join lanes l on l.id = j.lane_id
         where j.tenant_id = h.tenant_id and j.id = h.job_id limit 1) j on true
 where h.tenant_id = $1::int and h.run_id >= $2::uuid and h.run_id < $3::uuid
 order by h.run_id, h.attempt

-- :name line
-- All that a row says, as one text that both databases write alike.
concat_ws('|', run_id, attempt, job_id, job_version, final::int, state, coalesce(outcome, '~'), coalesce(reason, '~'),
          count, fence, trigger, priority, failures, losses, max_attempts, coalesce(first_for, -1), scheduled_for, ready_at,
          coalesce(started_at, -1), finished_at, coalesce(worker_id::text, '~'), coalesce(exit_code, -1),
          coalesce(error_class, '~'), coalesce(error, '~'), coalesce(usage, '~'), coalesce(result, '~'),
          coalesce(args, '~'), coalesce(tags, '~'), coalesce(origin_run_id::text, '~'), coalesce(logical_at, -1),
          coalesce(workflow_run_id::text, '~'))

-- :name proof
-- Of the rows of a slice: how many, and the sum of their digests.
select count(*) as rows, coalesce(sum(('x' || left(md5(
-- :include line
), 15))::bit(60)::bigint), 0)::text as digest
  from (select run_id::text, attempt, job_id::text, job_version, final, state, outcome, reason, count, fence, trigger,
               priority, failures, losses, max_attempts, (extract(epoch from first_for) * 1000000)::bigint as first_for,
               (extract(epoch from scheduled_for) * 1000000)::bigint as scheduled_for,
               (extract(epoch from ready_at) * 1000000)::bigint as ready_at,
               (extract(epoch from started_at) * 1000000)::bigint as started_at,
               (extract(epoch from finished_at) * 1000000)::bigint as finished_at,
               worker_id, exit_code, error_class, error, usage, result, args, tags::text, origin_run_id,
               (extract(epoch from logical_at) * 1000000)::bigint as logical_at, workflow_run_id
          from history h
         where h.tenant_id = $1 and h.run_id >= $2::uuid and h.run_id < $3::uuid) h

-- :name proof_of_file
select count(*) as rows, coalesce(sum(('0x' || left(md5(
-- :include line
), 15))::bigint), 0)::hugeint::text as digest
  from (select run_id::text as run_id, attempt, job_id::text as job_id, job_version, final, state, outcome, reason, count,
               fence, trigger, priority, failures, losses, max_attempts, epoch_us(first_for) as first_for,
               epoch_us(scheduled_for) as scheduled_for, epoch_us(ready_at) as ready_at,
               epoch_us(started_at) as started_at, epoch_us(finished_at) as finished_at,
               worker_id, exit_code, error_class, error, usage, result, args, tags, origin_run_id,
               epoch_us(logical_at) as logical_at, workflow_run_id
          from read_parquet($FILES)) h

-- :name erasing
select exists (select from erasures e where e.state <> 'erased')

-- :name add_file
-- $7: from now on it is read.
insert into archives (tenant_id, day, object, rows, bytes, checksum, cold_at)
values ($1, $2, $3, $4, $5, $6, case when $7 then now() end)

-- :name forget_files
-- Of a try that did not come to an end. What they named is removed.
delete from archives a
 where a.day = $1 and a.cold_at is null and not exists (select from archived_days d where d.day = a.day)

-- :name listed
select a.object from archives a where a.tenant_id = $1 and a.day = $2

-- :name remove
-- What a file holds of a tenant's day; answers how many rows.
with removed as (
    delete from history h where h.tenant_id = $1 and h.run_id >= $2::uuid and h.run_id < $3::uuid returning 1
)
select count(*) from removed

-- :name turn_cold
-- From this commit on the day is read from its files. All of it must be there, but for what is in use already.
insert into archived_days (day)
select $1
 where (select coalesce(sum(a.rows), 0) from archives a where a.day = $1 and a.cold_at is null)
     = (select count(*) from history h where h.run_id >= $2::uuid and h.run_id < $3::uuid)
returning day

-- :name detach
alter table history detach partition $NAME concurrently

-- :name finalize
alter table history detach partition $NAME finalize

-- :name drop
drop table if exists $NAME

-- :name mark_gone
update archived_days set gone_at = now() where day = $1 and gone_at is null
