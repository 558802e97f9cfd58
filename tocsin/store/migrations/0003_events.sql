-- Events: what changed, for whoever listens. Written by triggers, so that no statement can forget it, and only for
-- tenants somebody listens to; for all others a statement pays one look into an empty table.
--
-- Unlogged, both of them: a crash or a fail-over empties them, a feed that is opened again has another mark, and
-- whoever resumes from an id of the old one is told to read anew.

-- Tenants that are listened to. There is a row from the first listener until some minutes after the last.
create unlogged table event_feeds (
    tenant_id int primary key references tenants,
    mark int not null default (random() * 2147483647)::int,
    -- All changes by transactions with a higher number are in `events`; null: not known yet.
    since bigint,
    open_until timestamptz not null
);

-- Changes that one statement made for one tenant, at most a hundred to a row.
create unlogged table events (
    tenant_id int not null,
    -- Numbers of a sequence are committed out of order. Below the oldest transaction that still runs nothing more can
    -- come, so readers go by (xid, seq) up to there.
    xid bigint not null default (pg_current_xact_id()::text::bigint),
    seq bigint generated always as identity,
    at timestamptz not null default now(),
    subject text not null,
    changes text not null,
    primary key (tenant_id, xid, seq)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- A run was made or moved. One staged ahead of its instant is told when it is due: until then an edit may take it back.
create function note_runs()
    returns trigger language plpgsql security definer set search_path = tocsin, pg_temp as $$
begin
    if exists (select from event_feeds) then
        insert into events (tenant_id, subject, changes)
        select c.tenant_id, 'run',
               json_agg(json_build_array(c.state, c.id, c.job_id, c.job_version, c.state, c.attempt,
                                         null, null, c.blocked_by))
          from (select c.*, (row_number() over (partition by c.tenant_id order by c.id) - 1) / 100 as part
                  from changed c
                 where c.tenant_id = any(array(select f.tenant_id from event_feeds f))
                   and not (tg_op = 'INSERT' and c.state = 'staged' and c.trigger = 'schedule')) c
         group by c.tenant_id, c.part
         order by c.tenant_id, c.part;
    end if;
    return null;
end $$;

-- An attempt ended, or a run.
create function note_ends()
    returns trigger language plpgsql security definer set search_path = tocsin, pg_temp as $$
begin
    if exists (select from event_feeds) then
        insert into events (tenant_id, subject, changes)
        select c.tenant_id, 'run',
               json_agg(json_build_array(case when c.final then c.state else 'retrying' end, c.run_id, c.job_id,
                                         c.job_version, c.state, c.attempt, c.outcome, c.reason, null))
          from (select c.*, (row_number() over (partition by c.tenant_id order by c.run_id) - 1) / 100 as part
                  from changed c
                 where c.tenant_id = any(array(select f.tenant_id from event_feeds f))) c
         group by c.tenant_id, c.part
         order by c.tenant_id, c.part;
    end if;
    return null;
end $$;

create function note_new_jobs()
    returns trigger language plpgsql security definer set search_path = tocsin, pg_temp as $$
begin
    if exists (select from event_feeds) then
        insert into events (tenant_id, subject, changes)
        select c.tenant_id, 'job', json_agg(json_build_array('created', c.id, c.name, c.version, c.state))
          from (select c.*, (row_number() over (partition by c.tenant_id order by c.id) - 1) / 100 as part
                  from changed c
                 where c.tenant_id = any(array(select f.tenant_id from event_feeds f))) c
         group by c.tenant_id, c.part
         order by c.tenant_id, c.part;
    end if;
    return null;
end $$;

-- Old and new are brought together by grouping: the engine's sessions have no join for tables without an index.
create function note_jobs()
    returns trigger language plpgsql security definer set search_path = tocsin, pg_temp as $$
begin
    if exists (select from event_feeds) then
        insert into events (tenant_id, subject, changes)
        select c.tenant_id, 'job', json_agg(json_build_array(c.what, c.id, c.name, c.version, c.state))
          from (select c.tenant_id, c.id, max(c.name) as name, max(c.version) as version, max(c.state) as state,
                       case when max(c.state) = max(c.old_state) then 'updated'
                            when max(c.state) = 'active' then 'resumed'
                            else max(c.state) end as what,
                       (row_number() over (partition by c.tenant_id order by c.id) - 1) / 100 as part
                  from (select n.tenant_id, n.id, n.name, n.version, n.state, '' as old_state, 0 as old_version
                          from changed n
                        union all
                        select o.tenant_id, o.id, null, null, null, o.state, o.version from former o) c
                 where c.tenant_id = any(array(select f.tenant_id from event_feeds f))
                 group by c.tenant_id, c.id
                having (max(c.state), max(c.version)) is distinct from (max(c.old_state), max(c.old_version))) c
         group by c.tenant_id, c.part
         order by c.tenant_id, c.part;
    end if;
    return null;
end $$;

-- Only the new rows of `runs` are looked at: keeping the old ones, too, costs every claim some percent.
create trigger note_new_runs after insert on runs
    referencing new table as changed for each statement execute function note_runs();
create trigger note_runs after update on runs
    referencing new table as changed for each statement execute function note_runs();
create trigger note_ends after insert on history
    referencing new table as changed for each statement execute function note_ends();
create trigger note_new_jobs after insert on jobs
    referencing new table as changed for each statement execute function note_new_jobs();
create trigger note_jobs after update on jobs
    referencing old table as former new table as changed for each statement execute function note_jobs();

grant select, insert, update, delete on event_feeds to tocsin_engine;
grant select, delete on events to tocsin_engine;

do $$
declare t text;
begin
    foreach t in array array['event_feeds', 'events'] loop
        execute format('alter table %I enable row level security', t);
        execute format('alter table %I force row level security', t);
        execute format('create policy engine on %I to tocsin_engine, tocsin_owner using (true) with check (true)', t);
        execute format($p$create policy tenant on %I to tocsin_app
            using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
            with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)$p$, t);
    end loop;
end $$;
