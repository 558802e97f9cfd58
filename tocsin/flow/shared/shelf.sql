-- Sections that read `$FILES` run in DuckDB.

-- :name upto
-- The last record of a tenant that is read from a file; null if none is.
select f.last_seq from audit_archives f where f.tenant_id = $1 order by f.first_seq desc limit 1

-- :name beginning
-- Behind which record the chain begins, because those up to it were not to be kept any longer; and from which day on
-- anchors are looked at: whoever says that they were older is held to those.
select f.last_seq, f.last_hash, f.last_id, least(f.day, (f.last_at at time zone 'UTC')::date) as day
  from audit_archives f
 where f.tenant_id = $1 and f.expired_at is not null
 order by f.first_seq desc
 limit 1

-- :name holding
-- Files that end at or behind a record, in order.
select f.first_seq, f.last_seq, f.last_hash, f.last_id, f.day, f.object, f.bytes, f.checksum, f.previous
  from audit_archives f
 where f.tenant_id = $1 and f.last_seq >= $2 and f.expired_at is null
 order by f.first_seq
 limit $3

-- :name below
-- Files with records below $2 that may be of a time, the newest first.
select f.first_seq, f.last_seq, f.last_hash, f.last_id, f.day, f.object, f.bytes, f.checksum, f.previous
  from audit_archives f
 where f.tenant_id = $1 and f.first_seq < $2 and f.expired_at is null
   and ($3::timestamptz is null or f.last_at >= $3) and ($4::timestamptz is null or f.first_at < $4)
 order by f.first_seq desc
 limit $5

-- :name record
-- As trail.sql reads one from the database. Quoted are words that DuckDB would take for its own.
select seq, unhex(hash) as hash, id as audit_id, id, "at", epoch_us("at") as micros, actor, key_id, action, target, detail,
       unhex("before") as "before", unhex("after") as "after", address, request_id, previous_file
  from read_parquet($FILES)

-- :name records
-- Of one file: those behind a record, and those that do not belong there.
-- :include record
 where tenant_id = $tenant and (seq > $after or seq < $first)
 order by seq, id

-- :name list
-- :include record
 where tenant_id = $tenant and seq < $top
   and ($actor is null or actor = $actor)
   and ($action is null or action = $action)
   and ($target is null or target = $target)
   and ($from_ is null or "at" >= $from_)
   and ($to is null or "at" < $to)
 order by seq desc
 limit $limit
