-- :name so_far
-- How many lines of attempt `r` there are already, and how many bytes its tenant may still log today (null: any).
 cross join lateral (
        select coalesce((select c.first_line + c.lines from log_chunks c
                          where c.tenant_id = r.tenant_id and c.run_id = r.id and c.attempt = r.attempt
                          order by c.first_line desc limit 1), 0) as lines) l
 cross join lateral (
        select t.log_bytes_per_day - coalesce(
                    (select u.bytes from log_usage u
                      where u.tenant_id = t.id and u.day = (now() at time zone 'UTC')::date), 0) as room
          from tenants t
         where t.id = r.tenant_id
         limit 1) q

-- :name held
-- Whose lines these are. A stale fence finds nothing.
select i.n, r.tenant_id, r.job_id::text as job_id, r.id::text as run_id, q.room, l.lines
  from unnest($2::uuid[], $3::int[], $4::bigint[]) with ordinality as i(run_id, attempt, fence, n)
  join runs r on r.worker_id = $1 and r.id = i.run_id and r.state in ('running', 'stopping')
             and r.attempt = i.attempt and r.fence = i.fence
-- :include so_far

-- :name late
-- The same for attempts whose end this worker has told: a result does not wait for ever for its lines, and they may
-- follow it for a while.
select i.n, r.tenant_id, r.job_id::text as job_id, r.id::text as run_id, q.room, l.lines
  from unnest($2::uuid[], $3::int[], $4::bigint[], $5::int[]) with ordinality as i(run_id, attempt, fence, tenant_id, n)
 cross join lateral (
        select h.tenant_id, h.run_id as id, h.job_id, h.attempt, h.fence, h.worker_id, h.outcome, h.finished_at
          from history h
         where h.tenant_id = i.tenant_id and h.run_id = i.run_id and h.attempt = i.attempt
         limit 1) r
-- :include so_far
 where r.worker_id = $1 and r.fence = i.fence and r.outcome <> 'lost' and r.finished_at > now() - interval '1 hour'

-- :name late_anywhere
-- For workers of an older build, which do not name the tenant: search each tenant's index, at most $5 times. The first
-- chunk is always searched for.
select i.n, r.tenant_id, r.job_id::text as job_id, r.id::text as run_id, q.room, l.lines
  from unnest($2::uuid[], $3::int[], $4::bigint[]) with ordinality as i(run_id, attempt, fence, n)
 cross join tenants t
 cross join lateral (
        select h.tenant_id, h.run_id as id, h.job_id, h.attempt, h.fence, h.worker_id, h.outcome, h.finished_at
          from history h
         where h.tenant_id = t.id and h.run_id = i.run_id and h.attempt = i.attempt
         limit 1) r
-- :include so_far
 where r.worker_id = $1 and r.fence = i.fence and r.outcome <> 'lost' and r.finished_at > now() - interval '1 hour'
   and i.n <= greatest(1, $5::bigint / (select count(*) from tenants))

-- :name add
-- Where lines lie, and what each tenant has in the object; answers of which attempts. A frame whose place another
-- shipment has taken is void.
with frames as (
    select * from unnest($3::int[], $4::uuid[], $5::int[], $6::bigint[], $7::int[], $8::bigint[], $9::int[])
        as f(tenant_id, run_id, attempt, first_line, lines, position, bytes)),
added as (
    insert into log_chunks (tenant_id, run_id, attempt, first_line, lines, object, position, bytes)
    select f.tenant_id, f.run_id, f.attempt, f.first_line, f.lines, $1::text, f.position, f.bytes from frames f
        on conflict do nothing
    returning tenant_id, run_id, attempt, position),
segments as (
    insert into log_segments (tenant_id, id, object, position, bytes, lines, raw_bytes, stored_bytes, first_at, last_at,
                              void)
    select s.tenant_id, $2::uuid, $1::text, s.position, s.bytes, s.lines, s.raw_bytes, s.stored_bytes, s.first_at,
           s.last_at,
           array(select f.position from frames f
                  where f.tenant_id = s.tenant_id and f.position not in (select a.position from added a))
      from unnest($10::int[], $11::bigint[], $12::int[], $13::int[], $14::bigint[], $15::bigint[],
                  $16::timestamptz[], $17::timestamptz[])
            as s(tenant_id, position, bytes, lines, raw_bytes, stored_bytes, first_at, last_at)
     where s.tenant_id in (select a.tenant_id from added a))
select a.run_id::text as run_id, a.attempt from added a

-- :name use
-- Count bytes of tenants that have a quota for them, today's only. In the order of the tenants, as every node takes them.
insert into log_usage (tenant_id, day, bytes)
select u.tenant_id, (now() at time zone 'UTC')::date, u.bytes
  from unnest($1::int[], $2::bigint[]) as u(tenant_id, bytes)
 order by u.tenant_id
    on conflict (tenant_id) do update
   set bytes = excluded.bytes + case when log_usage.day = excluded.day then log_usage.bytes else 0 end,
       day = excluded.day

-- :name chunks
select attempt, first_line, lines, object, position, bytes
  from log_chunks
 where tenant_id = $1 and run_id = $2 and attempt = $3 and first_line + lines > $4
 order by first_line
 limit $5

-- :name last_attempt
select max(attempt) from log_chunks where tenant_id = $1 and run_id = $2

-- :name look
-- For those who follow logs: the newest attempt of each run, whether the run has ended, and where its log ends.
select coalesce(r.attempt, h.attempt, l.attempt, 0) as attempt,
       case when r.attempt is null then coalesce(h.state, 'gone') end as ended,
       coalesce(l.attempt, 0) as log_attempt, coalesce(l.lines, 0) as lines
  from unnest($1::int[], $2::uuid[]) with ordinality as i(tenant_id, run_id, n)
  left join lateral (
        select attempt from runs where tenant_id = i.tenant_id and id = i.run_id limit 1) r on true
  left join lateral (
        select attempt, state from history
         where tenant_id = i.tenant_id and run_id = i.run_id
         order by attempt desc limit 1) h on true
  left join lateral (
        select attempt, first_line + lines as lines from log_chunks
         where tenant_id = i.tenant_id and run_id = i.run_id
         order by attempt desc, first_line desc limit 1) l on true
 order by i.n
