-- pre: which large payloads lie in object storage, and who needs them, so that those that nobody needs any more can go.
create table payloads (
    tenant_id int not null,
    object text not null,
    -- When it is to be seen whether anybody needs it; never while a call that has stored it may still be under way.
    look_at timestamptz not null,
    primary key (tenant_id, object)
);
create index payloads_due on payloads (look_at);

-- A run that has it as its arguments, or a job that has it in its document or in one that was replaced.
create table payload_uses (
    tenant_id int not null,
    object text not null,
    user_id uuid not null,
    look_at timestamptz not null,
    primary key (tenant_id, object, user_id)
);
create index payload_uses_due on payload_uses (look_at);

grant select, insert, update, delete on payloads, payload_uses to tocsin_engine, tocsin_app;
alter table payloads enable row level security;
alter table payloads force row level security;
create policy engine on payloads to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on payloads to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
alter table payload_uses enable row level security;
alter table payload_uses force row level security;
create policy engine on payload_uses to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on payload_uses to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
