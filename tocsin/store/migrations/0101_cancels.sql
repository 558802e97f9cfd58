-- pre: jobs that are cancelled with more runs than one transaction ends; any server goes on where the last one stopped.
create table cancels (
    tenant_id int not null,
    job_id uuid not null,
    reason text not null,
    stop_running boolean not null,
    -- Runs up to this id are cancelled; the row goes when all are.
    done_to uuid not null,
    turn_at timestamptz not null default now(),
    primary key (tenant_id, job_id)
);
create index cancels_turn on cancels (turn_at);

grant select, insert, update, delete on cancels to tocsin_engine, tocsin_app;
alter table cancels enable row level security;
alter table cancels force row level security;
create policy engine on cancels to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on cancels to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
-- A key that is kept to some jobs sees no others there (0061_scoped_keys.sql).
create policy scope on cancels as restrictive to tocsin_app
    using (coalesce(current_setting('tocsin.scope', true), '') = ''
           or exists (select from jobs j where j.tenant_id = cancels.tenant_id and j.id = cancels.job_id));
