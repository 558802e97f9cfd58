-- pre: circuits, which jobs that call the same dependency share, so that none calls it while it fails.
create table circuits (
    tenant_id int not null,
    -- Follows from tenant and name; the `blocked_key` of runs that wait for it.
    id uuid not null,
    name text not null,
    -- When it opens and for how long, as JSON; null: as by default.
    policy text,
    state text not null default 'closed' check (state in ('closed', 'open', 'half_open')),
    since timestamptz not null default now(),
    by_hand boolean not null default false,
    -- The last calls while it is closed, as JSON: when they ended, and whether they failed.
    recent text not null default '[]',
    trips int not null default 0,
    wave int not null default 0,
    sent int not null default 0,
    good int not null default 0,
    bad int not null default 0,
    next_at timestamptz,
    created_at timestamptz not null default now(),
    primary key (tenant_id, id)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
create unique index circuits_name on circuits (tenant_id, name);
create index circuits_busy on circuits (next_at) where state <> 'closed' or next_at is not null;

alter table jobs add column circuit_id uuid;
alter table runs
    add column circuit_id uuid,
    -- Passes while its circuit is half open.
    add column canary boolean not null default false;
create index runs_canary on runs (circuit_id) where canary;

create function note_circuit()
    returns trigger language plpgsql security definer set search_path = tocsin, pg_temp as $$
begin
    if exists (select from event_feeds f where f.tenant_id = new.tenant_id) then
        insert into events (tenant_id, subject, changes)
        values (new.tenant_id, 'circuit',
                json_build_array(json_build_array(
                    case new.state when 'open' then 'opened' when 'closed' then 'closed' else 'probing' end,
                    new.id, new.name, new.state)));
    end if;
    return null;
end $$;
-- A row that counts a call changes no state, and costs nothing here.
create trigger note_circuit after update on circuits
    for each row when (old.state is distinct from new.state) execute function note_circuit();

grant select, insert, update, delete on circuits to tocsin_engine, tocsin_app;
alter table circuits enable row level security;
alter table circuits force row level security;
create policy engine on circuits to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on circuits to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
