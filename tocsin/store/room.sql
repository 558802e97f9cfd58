-- :name left
-- Counted by database, which everybody may see, unlike who they are.
select (select sum(d.numbackends)::float8 from pg_stat_database d) / current_setting('max_connections')::int as connections,
       pg_notification_queue_usage() as notifications,
       (select coalesce(max(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)), 0)::float8
          from pg_replication_slots s) as retained

-- :name dead
-- For each live row; a table that is nearly empty is taken for one of a thousand, or its last few would look like a flood.
select s.relname::text as name, s.n_dead_tup::float8 / greatest(s.n_live_tup, 1000) as ratio
  from pg_stat_user_tables s
 where s.schemaname = 'tocsin' and s.relname in ('runs', 'triggers', 'limits', 'workers')
