-- Run by psql as the superuser of the embedded PostgreSQL at each of its starts; repeatable, and it mends what is
-- missing. The login's password comes from the environment, because arguments can be read by everyone.
\set ON_ERROR_STOP on
\getenv password TOCSIN_LOGIN_PASSWORD
set client_min_messages = warning;

do $$
declare r text;
begin
    if not exists (select from pg_roles where rolname = 'tocsin') then
        create role tocsin;
    end if;
    foreach r in array array['tocsin_owner', 'tocsin_engine', 'tocsin_app'] loop
        if not exists (select from pg_roles where rolname = r) then
            execute format('create role %I nologin nosuperuser nobypassrls', r);
        end if;
        -- Set, not inherit: a forgotten SET ROLE then reads nothing instead of everything.
        if current_setting('server_version_num')::int >= 160000 then
            if not pg_has_role('tocsin', r, 'set') then
                execute format('grant %I to tocsin with inherit false, set true', r);
            end if;
        elsif not pg_has_role('tocsin', r, 'member') then
            execute format('grant %I to tocsin', r);
        end if;
    end loop;
    grant pg_read_all_stats to tocsin_engine;  -- to name a session that keeps dead rows from being removed
end $$;

alter role tocsin login nosuperuser nobypassrls nocreaterole nocreatedb noreplication password :'password';

select not exists (select from pg_database where datname = 'tocsin') as missing \gset
\if :missing
    create database tocsin owner tocsin_owner;
\endif
