-- :name now
select now()

-- :name notify
select pg_notify($1, $2)

-- :name safety
select current_setting('server_version_num')::int as version,
       r.rolsuper as superuser,
       r.rolbypassrls as bypass,
       (select string_agg(name || '=' || setting, ', ')
          from pg_settings
         where (name in ('fsync', 'full_page_writes') and setting <> 'on')
            or (name = 'synchronous_commit' and setting = 'off')) as unsafe
  from pg_roles r
 where r.rolname = current_user

-- :name begin
begin

-- :name begin_tenant
begin; set local tocsin.tenant = '$1'

-- :name commit
commit

-- :name rollback
rollback
