-- Each report counts rows of history. `$ROWS` is one of `hot` and `cold` (the latter in DuckDB, over Parquet); what is
-- counted of them is written so that both understand it. A run's attempts lie in one day and a day is hot or cold, so what
-- the two count can be added.

-- :name hot
-- $1 tenants  $2 from  $3 to (ids)  $4 rows at most, the newest  $5 the group
-- What stands in an id is when the run was made: 48 bits of milliseconds.
select h.run_id::text as run_id, h.final, h.state, h.outcome, h.count, h.ready_at, h.started_at, h.finished_at,
       case $5::text
           when 'job' then h.job_id::text
           when 'worker' then h.worker_id::text
           when 'class' then coalesce(h.error_class, h.outcome)
           when 'tenant' then h.tenant_id::text
           when 'pool' then (select l.pool from jobs j join lanes l on l.id = j.lane_id
                              where j.tenant_id = h.tenant_id and j.id = h.job_id limit 1)
           when 'day' then to_char(m.made at time zone 'UTC', 'YYYY-MM-DD')
           when 'hour' then to_char(m.made at time zone 'UTC', 'YYYY-MM-DD"T"HH24:00"Z"')
           else 'total' end as key,
       null::text as label
  from unnest($1::int[]) as t(id)
 cross join lateral (
        select * from history h
         where h.tenant_id = t.id and h.run_id >= $2::uuid and h.run_id < $3::uuid
         order by h.run_id desc
         limit $4) h
 cross join lateral (
        select to_timestamp(('x' || translate(left(h.run_id::text, 13), '-', ''))::bit(48)::bigint / 1000.0) as made) m
    -- Days whose partitions are on their way out are counted from their files already.
 where (m.made at time zone 'UTC')::date <> all (array(select day from archived_days where gone_at is null))
 limit $4

-- :name cold
-- The same from files, in DuckDB.
select h.run_id::varchar as run_id, h.final, h.state, h.outcome, h.count, h.ready_at, h.started_at, h.finished_at,
       case $5::varchar
           when 'job' then h.job_id::varchar
           when 'worker' then h.worker_id::varchar
           when 'class' then coalesce(h.error_class, h.outcome)
           when 'tenant' then h.tenant_id::varchar
           when 'pool' then h.pool
           when 'day' then strftime(h.made, '%Y-%m-%d')
           when 'hour' then strftime(h.made, '%Y-%m-%dT%H:00Z')
           else 'total' end as key,
       case when $5::varchar = 'job' then h.job_name end as label
  from (select *, epoch_ms(('0x' || replace(left(run_id::varchar, 13), '-', ''))::bigint) as made
          from
-- :include rows_of_files
) h
 where list_contains($1::int[], h.tenant_id) and h.run_id >= $2::uuid and h.run_id < $3::uuid
 limit $4

-- :name runs
with found as materialized (
$ROWS
)
select key, state, sum(count)::bigint as runs, max(label) as label, (select count(*) from found) as scanned
  from found
 where final
 group by key, state

-- :name durations
-- $6 the groups. Of the attempt that a run ended with, by buckets (model/reports.py).
with found as materialized (
$ROWS
), measured as (
    select key,
           ceil(ln(greatest(extract(epoch from finished_at - started_at) * 1000, 0.1)) / ln(1.05))::int as duration,
           ceil(ln(greatest(extract(epoch from started_at - ready_at) * 1000, 0.1)) / ln(1.05))::int as lag
      from found
     where final and started_at is not null and key = any($6)
)
select key, duration, lag, count(*) as runs
  from measured
 group by grouping sets ((key, duration), (key, lag))

-- :name failures
with found as materialized (
$ROWS
)
select key, count(*) as failures, count(distinct run_id) as runs,
       count(case when final and state = 'dead' then 1 end) as dead,
       max(finished_at) as last_at, max(run_id) as last_run_id, max(label) as label,
       (select count(*) from found) as scanned
  from found
 where outcome in ('failed', 'timeout', 'lost')
 group by key

-- :name utilisation
with found as materialized (
$ROWS
)
select key, count(*) as attempts, sum(extract(epoch from finished_at - started_at)) as busy_seconds,
       max(label) as label, (select count(*) from found) as scanned
  from found
 where started_at is not null
 group by key

-- :name steady
-- All statements of the transaction see one moment, as those of a tenant's do.
set transaction isolation level repeatable read, read only

-- :name tenants
select id, slug from tenants order by id

-- :name job_names
select id::text as key, name as label from jobs where tenant_id = $1 and id = any($2::uuid[])

-- :name capacity
-- What workers had to offer between $1 and $2.
select w.id::text as id, w.name, w.pool,
       (w.slots * extract(epoch from least($2, coalesce(w.gone_at, now())) - greatest($1, w.registered_at)))::float8
           as seconds
  from (select id, name, pool, slots, registered_at, gone_at from workers
         union all
        select id, name, pool, slots, registered_at, gone_at from past_workers where gone_at > $1) w
 where w.registered_at < $2 and coalesce(w.gone_at, $2) > $1 and w.id <> '00000000-0000-7000-8000-000000000001'

-- :name remembered
-- Whether that is known of all who were there from $1 on. They are remembered for 400 days, but for a week only where a
-- release from before there was `past_workers` was at work.
select $1::timestamptz > now() - interval '400 days'
   and not exists (select from migrations m
                    where m.name = '0083_past_workers' and $1 < m.applied_at - interval '7 days'
                      and m.applied_at > (select min(f.applied_at) + interval '1 hour' from migrations f))
