-- :name holders
-- Open transactions of this database's sessions, prepared transactions, and replication slots that hold rows back.
-- What a session is doing is shown to its own user and to members of pg_read_all_stats; of other sessions nothing is
-- known. Vacuum holds nothing back.
select a.backend_type as kind, a.pid, a.usename::text as "user", a.application_name as application,
       coalesce(a.state, '') as state, extract(epoch from now() - a.xact_start)::float8 as seconds,
       a.backend_xmin is not null as holds
  from pg_stat_activity a
 where a.pid <> pg_backend_pid() and a.backend_type not like 'autovacuum%'
   and (a.datname = current_database() and a.xact_start is not null or a.datname is null and a.backend_xmin is not null)
union all
select 'prepared transaction', null, p.owner::text, p.gid, 'prepared', extract(epoch from now() - p.prepared)::float8, true
  from pg_prepared_xacts p
 where p.database = current_database()
union all
select 'replication slot', s.active_pid, null, s.slot_name::text, case when s.active then 'active' else 'idle' end, null, true
  from pg_replication_slots s
 where s.xmin is not null

-- :name sees_all
select pg_has_role(current_user, 'pg_read_all_stats', 'usage')
