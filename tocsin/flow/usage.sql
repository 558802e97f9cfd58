-- :name at_present
-- How many open jobs a tenant has, how many runs that have not started and how many that run, each counted up to $2; and
-- what it logged today, if it has a quota for that.
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

-- :name lately
-- Runs that were made since $2, the newest $3 of those that live and of the rows of those that ended; `oldest`: where it
-- began to count, if there were more. An occurrence that got no run is none.
with live as materialized (
    select r.id from runs r where r.tenant_id = $1 and r.id >= $2::uuid order by r.id desc limit $3
), ended as materialized (
    select h.run_id as id, h.final, h.state, h.started_at
      from history h
     where h.tenant_id = $1 and h.run_id >= $2::uuid
     order by h.run_id desc, h.attempt desc
     limit $3
), begun as materialized (
    select greatest(
               case when (select count(*) from live) = $3 then (select l.id from live l order by l.id limit 1) end,
               case when (select count(*) from ended) = $3 then (select e.id from ended e order by e.id limit 1) end) as at
)
select b.at::text as oldest,
       ((select count(*) from live l where b.at is null or l.id >= b.at)
        + (select count(*) from ended e where e.final and e.state <> 'skipped' and (b.at is null or e.id >= b.at)))::int
           as submitted,
       (select count(*) from ended e where e.final and e.started_at is not null and (b.at is null or e.id >= b.at))::int
           as ran,
       (select count(*) from ended e where e.final and e.state = 'dead' and (b.at is null or e.id >= b.at))::int as failed
  from begun b

-- :name stored
-- Bytes in object storage, up to $3 objects of a kind: archived history and audit, log lines, and how many payloads; and
-- bytes of the lines that came since $2, before they were compressed.
select (select coalesce(sum(a.bytes), 0)::bigint
          from (select a.bytes from archives a where a.tenant_id = $1 and a.expired_at is null limit $3) a) as history_bytes,
       (select coalesce(sum(f.bytes), 0)::bigint
          from (select f.bytes from audit_archives f where f.tenant_id = $1 and f.object is not null limit $3) f) as audit_bytes,
       (select coalesce(sum(s.stored_bytes), 0)::bigint
          from (select s.stored_bytes from log_segments s where s.tenant_id = $1 and s.replaced_at is null limit $3) s) as log_bytes,
       (select count(*)::int
          from (select from payloads p where p.tenant_id = $1 limit $3) p) as payloads,
       (select coalesce(sum(s.raw_bytes), 0)::bigint
          from (select s.raw_bytes from log_segments s
                 where s.tenant_id = $1 and s.id >= $2::uuid and s.replaced_at is null limit $3) s) as logged_today
