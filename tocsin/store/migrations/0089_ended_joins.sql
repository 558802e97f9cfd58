-- pre: a run that is cancelled while it waits for runs of other jobs is not made anew by the next of them that ends.
-- A row until nobody can come any more to whom it would matter: few at any time.
create table ended_joins (
    tenant_id int not null,
    job_id uuid not null,
    join_key uuid not null,
    run_id uuid not null,
    -- As of the run: by these it is known who can still come.
    chain uuid,
    logical_at timestamptz,
    primary key (tenant_id, job_id, join_key)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
create index ended_joins_run on ended_joins (run_id);

grant select, insert, update, delete on ended_joins to tocsin_engine, tocsin_app;
alter table ended_joins enable row level security;
alter table ended_joins force row level security;
create policy engine on ended_joins to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on ended_joins to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
-- A key that is kept to some jobs sees no others there (0061_scoped_keys.sql).
create policy scope on ended_joins as restrictive to tocsin_app
    using (coalesce(current_setting('tocsin.scope', true), '') = ''
           or exists (select from jobs j where j.tenant_id = ended_joins.tenant_id and j.id = ended_joins.job_id));
