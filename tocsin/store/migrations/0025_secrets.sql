-- pre: secrets, and the keys that seal what tenants mark as sensitive. None of it is readable without a master key.
create table secrets (
    tenant_id int not null,
    name text not null,
    version int not null default 1,
    -- Another with every value: what was unsealed once is remembered by it.
    id uuid not null,
    -- The master key that `wrapped` is readable with; `wrapped` is the key that `sealed` is readable with.
    key_id text not null,
    wrapped bytea not null,
    sealed bytea not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    primary key (tenant_id, name)
);
create index secrets_wrapped on secrets (key_id, tenant_id, name);

-- What a tenant's sensitive arguments are sealed with. They are copied from table to table, so a new master key must
-- not mean to seal them anew.
create table data_keys (
    tenant_id int not null,
    id int not null default 1,
    key_id text not null,
    wrapped bytea not null,
    created_at timestamptz not null default now(),
    primary key (tenant_id, id)
);

grant select, insert, update, delete on secrets, data_keys to tocsin_engine, tocsin_app;
alter table secrets enable row level security;
alter table secrets force row level security;
create policy engine on secrets to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on secrets to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
alter table data_keys enable row level security;
alter table data_keys force row level security;
create policy engine on data_keys to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on data_keys to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
