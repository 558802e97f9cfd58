-- :name ledger
create schema if not exists tocsin;
create table if not exists tocsin.migrations (
    name text primary key,
    digest text not null,
    applied_at timestamptz not null default now()
);
alter table tocsin.migrations add column if not exists phase text not null default 'pre';

-- :name take_turn
-- One migrator at a time. Asked for, never waited for: a wait for a lock is cut short here, and this one may take long.
select pg_try_advisory_lock(hashtext('tocsin.migrate'))

-- :name there
select to_regclass('tocsin.migrations') is not null

-- :name applied
select name, digest, applied_at from tocsin.migrations order by name

-- :name record
insert into tocsin.migrations (name, digest, phase) values ($1, $2, $3)

-- :name servers
-- Servers that live, with the newest migration each knows. Null: one from before servers registered, told by the name of
-- its sessions.
select name, version, newest_migration
  from tocsin.servers
 where seen_at > now() - interval '30 seconds'
union all
select 'pid ' || a.pid, 'older', null
  from pg_stat_activity a
 where a.datname = current_database() and a.application_name = 'tocsin'
 order by 1

-- :name state
-- How many of these are applied; and what is missing that this program does not know was taken away. A ledger that no
-- migrator of this release has seen has no phases yet, hence the detour.
select count(*) filter (where m.name = any($1::text[])) as applied,
       array_agg(m.name order by m.name) filter (where to_jsonb(m) ->> 'phase' = 'post' and m.name <> all($2::text[]))
           as unknown
  from migrations m
