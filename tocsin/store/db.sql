-- :name now
select now()

-- :name notify
select pg_notify($1, $2)

-- :name timeline
select ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint as timeline

-- :name examine
-- What speaks against a new session, and its timeline. A transaction's whole length can be limited from 17 on; the
-- parameter cannot be given at the start of a session, because older servers refuse what they do not know.
select current_setting('server_version_num')::int as version,
       r.rolsuper as superuser,
       r.rolbypassrls as bypass,
       s.unsafe,
       s.limited,
       ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint as timeline
  from pg_roles r
 cross join (
        select string_agg(name || '=' || setting, ', ')
                   filter (where name in ('fsync', 'full_page_writes') and setting <> 'on'
                              or name = 'synchronous_commit' and setting not in ('on', 'remote_apply')) as unsafe,
               max(set_config(name, $1, false)) filter (where name = 'transaction_timeout') as limited
          from pg_settings
         where name in ('fsync', 'full_page_writes', 'synchronous_commit', 'transaction_timeout')) s
 where r.rolname = current_user

-- :name begin
begin

-- :name begin_tenant
begin; set local tocsin.tenant = '$1'

-- :name begin_snapshot
begin isolation level repeatable read, read only; set local tocsin.tenant = '$1'

-- :name keep_to
set local tocsin.scope_tags = $2; set local tocsin.scope = $1

-- :name commit
commit

-- :name rollback
rollback
