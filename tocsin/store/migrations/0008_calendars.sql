-- Named calendars, and which jobs go by them.
create table calendars (
    tenant_id int not null,
    name text not null,
    version int not null default 1,
    document text not null,
    digest text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    primary key (tenant_id, name)
);

-- `version` is the one by which the job's cursor was last set, and `since` when. When a calendar changes, the jobs that are
-- behind it are planned anew, in waves.
create table calendar_uses (
    tenant_id int not null,
    job_id uuid not null,
    calendar text not null,
    version int not null,
    since timestamptz not null default now(),
    primary key (tenant_id, job_id),
    foreign key (tenant_id, calendar) references calendars
);
create index calendar_uses_version on calendar_uses (tenant_id, calendar, version);

grant select, insert, update, delete on calendars, calendar_uses to tocsin_engine, tocsin_app;

do $$
declare t text;
begin
    foreach t in array array['calendars', 'calendar_uses'] loop
        execute format('alter table %I enable row level security', t);
        execute format('alter table %I force row level security', t);
        execute format('create policy engine on %I to tocsin_engine, tocsin_owner using (true) with check (true)', t);
        execute format($p$create policy tenant on %I to tocsin_app
            using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
            with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)$p$, t);
    end loop;
end $$;
