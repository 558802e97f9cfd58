-- :name tenants
-- Whose segments lie loose, and have for long enough that no shipment of the same lines is under way any more.
select t.id
  from tenants t
 cross join lateral (
        select 1 from log_segments s
         where s.tenant_id = t.id and not s.compacted and s.replaced_at is null
           and s.added_at < now() - $1 * interval '1 second'
         limit 1) l

-- :name loose
-- A tenant's loose segments behind $3, oldest first.
select s.id::text as id, s.object, s.position, s.bytes, s.void, s.raw_bytes,
       s.added_at < now() - interval '1 hour' as ripe
  from log_segments s
 where s.tenant_id = $1 and not s.compacted and s.replaced_at is null
   and s.added_at < now() - $2 * interval '1 second' and s.id > $3::uuid
 order by s.id
 limit $4

-- :name living
-- Those of these frames that are the place of lines.
select i.n
  from unnest($2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::bigint[]) with ordinality
        as i(run_id, attempt, first_line, object, position, n)
 cross join lateral (
        select 1 from log_chunks c
         where c.tenant_id = $1 and c.run_id = i.run_id and c.attempt = i.attempt and c.first_line = i.first_line
           and c.object = i.object and c.position = i.position
         limit 1) c

-- :name note
-- Before an object is written: if nothing comes to need it, it is to go.
insert into log_garbage (object, due_at) values ($1, now() + interval '1 hour')

-- :name use
-- Not if it is about to go, or has gone: who removes it has looked before this commit is seen, and does not look again.
delete from log_garbage where object = $1 and due_at > now() + interval '10 minutes' returning 1

-- :name replace
-- A little in the future: who searches until this commit is seen, and goes on after it, sees the same all the time.
update log_segments set replaced_at = now() + interval '5 seconds'
 where tenant_id = $1 and id = any($2::uuid[]) and not compacted and replaced_at is null
returning object

-- :name take_out
delete from log_chunks c
 using unnest($2::uuid[], $3::int[], $4::bigint[], $5::text[], $6::bigint[])
        as i(run_id, attempt, first_line, object, position)
 where c.tenant_id = $1 and c.run_id = i.run_id and c.attempt = i.attempt and c.first_line = i.first_line
   and c.object = i.object and c.position = i.position
returning 1

-- :name put_in
insert into log_chunks (tenant_id, run_id, attempt, first_line, lines, object, position, bytes)
select $1, f.run_id, f.attempt, f.first_line, f.lines, $2, f.position, f.bytes
  from unnest($3::uuid[], $4::int[], $5::bigint[], $6::int[], $7::bigint[], $8::int[])
        as f(run_id, attempt, first_line, lines, position, bytes)

-- :name add
insert into log_segments (tenant_id, id, object, position, bytes, lines, raw_bytes, stored_bytes, first_at, last_at,
                          compacted, added_at)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, true, now() + interval '5 seconds')

-- :name leave
-- What was replaced stays for searches that have begun, and reads that are under way.
insert into log_garbage (object, due_at)
select distinct o, now() + interval '1 hour' from unnest($1::text[]) as o
    on conflict (object) do update set due_at = excluded.due_at

-- :name due
-- Up to $1 objects that are due. Objects that also hold segments that are not compacted yet stay. Each object is put
-- off before its deletion is tried: one that storage refuses to delete does not delay those behind it. The delay is
-- shorter than the ten minutes of `use`, so that no server takes the object into use before the deletion.
with due as materialized (
    select g.ctid as place,
           exists (select from log_segments s where s.object = g.object and s.replaced_at is null) as needed
      from log_garbage g
     where g.due_at < now()
     order by g.due_at
     limit $1
       for update of g skip locked
)
update log_garbage g
   set due_at = now() + case when d.needed then interval '1 hour' else interval '5 minutes' end
  from due d
 where g.ctid = d.place
returning g.object, g.due_at, d.needed

-- :name forget
-- The object is deleted. Keep the row if a server that writes the object again has put it off since ($2;
-- flow/erase.py).
with segments as (delete from log_segments where object = $1 and replaced_at is not null)
delete from log_garbage where object = $1 and due_at = $2

-- :name unnamed
-- Of these objects, with when they were made, those that nothing names. Before there were segments, and for as long after
-- as servers of the release before may have lived, an object was named by lines alone.
select o.object
  from unnest($1::text[], $2::timestamptz[]) as o(object, made)
 where o.made > (select m.applied_at + interval '1 day' from migrations m where m.name = '0032_log_segments')
   and not exists (select from log_segments s where s.object = o.object)
   and not exists (select from log_garbage g where g.object = o.object)

-- :name hot_days
-- Of tenants whose runs leave the database at all, and that are not erased.
select t.id, coalesce(t.hot_days, $1)::int as days
  from tenants t
 where coalesce(t.hot_days, $1) > 0 and not exists (select from erasures e where e.tenant_id = t.id)
 order by t.id

-- :name with_listed
-- Those who have segments before their first hot day whose lines have rows.
select w.id, w.first::text as first
  from unnest($1::int[], $2::uuid[]) as w(id, first)
 cross join lateral (
        select from log_segments s
         where s.tenant_id = w.id and s.id < w.first and s.compacted and s.last_run is null and s.replaced_at is null
         limit 1) s

-- :name listed
-- The next $4 of a tenant's such segments, before $2 and behind $3.
select s.tenant_id, s.id::text as id, s.object, s.position, s.bytes
  from log_segments s
 where s.tenant_id = $1 and s.id < $2::uuid and s.id > $3::uuid
   and s.compacted and s.last_run is null and s.replaced_at is null
 order by s.id
 limit $4

-- :name unlist
-- From this commit on the directory tells where lines of these runs ($5) lie. Not while one of them may still log: how many
-- lines there are is counted by the rows.
update log_segments s
   set first_run = $3, last_run = $4
 where s.tenant_id = $1 and s.id = $2::uuid and s.last_run is null and s.replaced_at is null
   and not exists (
        select from unnest($5::uuid[]) as i(run_id)
         cross join lateral (select from runs r where r.tenant_id = $1 and r.id = i.run_id limit 1) r)
   and not exists (
        select from unnest($5::uuid[]) as i(run_id)
         cross join lateral (
                select from history h
                 where h.tenant_id = $1 and h.run_id = i.run_id and h.finished_at > now() - interval '2 hours'
                 limit 1) h)
returning 1
