-- The three roles, none of them a superuser. Runs with the rights of the login that was given; where that login may
-- not create roles, an administrator runs this file once (`tocsin migrate` says so).
do $$
declare r text;
begin
    foreach r in array array['tocsin_owner', 'tocsin_engine', 'tocsin_app'] loop
        if not exists (select from pg_roles where rolname = r) then
            execute format('create role %I nologin nosuperuser nobypassrls', r);
        end if;
        -- From 16 on, whoever creates a role is a member that may not become it, until told otherwise.
        if current_setting('server_version_num')::int >= 160000 then
            if not pg_has_role(session_user, r, 'set') then
                execute format('grant %I to %I with inherit false, set true', r, session_user);
            end if;
        elsif not pg_has_role(session_user, r, 'member') then
            execute format('grant %I to %I', r, session_user);
        end if;
    end loop;
    -- To name the session that keeps dead rows from being removed; where this login may not grant it, an administrator
    -- may, or that session stays unnamed (`tocsin doctor` says so).
    if not pg_has_role('tocsin_engine', 'pg_read_all_stats', 'usage') then
        begin
            grant pg_read_all_stats to tocsin_engine;
        exception when insufficient_privilege then
            null;
        end;
    end if;
    if not has_database_privilege('tocsin_owner', current_database(), 'create') then
        execute format('grant create on database %I to tocsin_owner', current_database());
    end if;
end $$;
