-- pre: what a run results in may lie in object storage, too, and a node may be mapped over it.

-- The day of a run that resulted in it: then it is needed for as long as that day is in the archive.
alter table payload_uses add column day date;

-- Mapped nodes of which all parents have ended, and whose runs are made once the list that they are of was fetched. Few at
-- any time, and none for longer than that takes.
create table unmapped (
    tenant_id int not null,
    run_id uuid not null,
    primary key (tenant_id, run_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

grant select, insert, update, delete on unmapped to tocsin_engine, tocsin_app;
alter table unmapped enable row level security;
alter table unmapped force row level security;
create policy engine on unmapped to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on unmapped to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
