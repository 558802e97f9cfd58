-- :name segments
-- A tenant's segments from a place on, newest first, as they were at one moment. An id tells when lines were stored;
-- that is less than a day from when they were written, or a clock is very wrong.
select id::text as id, object, position, bytes, void, raw_bytes, coalesce($2::timestamptz, now()) as as_of
  from log_segments
 where tenant_id = $1
   and added_at <= coalesce($2::timestamptz, now())
   and (replaced_at is null or replaced_at > coalesce($2::timestamptz, now()))
   and (id < $3::uuid or ($4 and id = $3::uuid))
   and id >= $5::uuid
   and ($6::timestamptz is null or last_at >= $6) and ($7::timestamptz is null or first_at < $7)
 order by id desc
 limit $8

-- :name fitting
-- Those of some attempts that are in the database: whose they are, and whether they have this tag, this class of error
-- and this job.
select i.run_id::text as run_id, i.attempt, coalesce(h.job_id, r.job_id)::text as job_id,
       ($4::text is null or coalesce(h.error_class = $4, false))
       and ($5::jsonb is null or coalesce(h.tags, r.tags) @> $5)
       and ($6::uuid is null or coalesce(h.job_id, r.job_id) = $6) as fits
  from unnest($2::uuid[], $3::int[]) as i(run_id, attempt)
  left join lateral (
        select job_id, tags, error_class from history
         where tenant_id = $1 and run_id = i.run_id and attempt = i.attempt limit 1) h on true
  left join lateral (
        select job_id, tags from runs where tenant_id = $1 and id = i.run_id limit 1) r on true
 where coalesce(h.job_id, r.job_id) is not null

-- :name fitting_in_files
-- Those of the others that fit, in DuckDB.
select h.run_id::varchar as run_id, h.attempt, h.job_id::varchar as job_id
  from
-- :include rows_of_files
 h
  join (select unnest($2::uuid[]) as run_id, unnest($3::int[]) as attempt) i
    on i.run_id = h.run_id and i.attempt = h.attempt
 where h.tenant_id = $1
   and ($4::varchar is null or h.error_class = $4)
   and ($5::varchar is null or json_contains(h.tags, $5))
   and ($6::uuid is null or h.job_id = $6)

-- :name chunks
-- The log of a run from a place on, attempt after attempt.
select attempt, first_line, lines, object, position, bytes
  from log_chunks
 where tenant_id = $1 and run_id = $2 and (attempt > $3 or (attempt = $3 and first_line + lines > $4))
 order by attempt, first_line
 limit $5
