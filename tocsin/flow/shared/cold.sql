-- Sections that read `$FILES` run in DuckDB.

-- :name files
-- $1 tenants  $2 from  $3 to (days, both included). The newest day first. A file is read when it is in use by itself,
-- or its day is.
select a.tenant_id, a.day, a.object, a.bytes, a.checksum, a.rows
  from unnest($1::int[]) as t(id)
 cross join lateral (
        select a.* from archives a where a.tenant_id = t.id and a.day >= $2 and a.day <= $3 and a.expired_at is null) a
 where a.cold_at is not null or exists (select from archived_days d where d.day = a.day)
 order by a.day desc, a.tenant_id, a.object

-- :name kept_since
-- From when on nothing that was archived has gone; null if nothing has. $2: for how many days runs are kept of tenants
-- that do not say.
select k.day::timestamp at time zone 'UTC'
  from tenants t
 cross join lateral (select (now() at time zone 'UTC')::date - coalesce(t.runs_days, $2::int) as day) k
 where t.id = $1 and exists (select from archived_days d where d.day < k.day)

-- :name rows_of_files
-- With all the columns that there are today, of which old files may lack some.
(select $NO_ROW where false union all by name select * from read_parquet($FILES, union_by_name = true))

-- :name ended_in_files
-- As history.sql reads them from the database.
select run_id::varchar as id, tenant_id, job_id::varchar as job_id, job_name, job_version, final, state,
       outcome, reason, null as blocked_by, attempt, failures, losses, max_attempts,
       fence, priority, scheduled_for, ready_at, started_at,
       finished_at, worker_id::varchar as worker, exit_code,
       error_class, error, args, result, usage,
       tags, trigger, origin_run_id::varchar as origin_run_id, count, null as lane_id,
       null as needs, null as progress, logical_at, workflow_run_id::varchar as workflow_run_id
  from
-- :include rows_of_files

-- :name run
-- :include ended_in_files
 where tenant_id = $tenant and run_id = $run
 order by attempt
