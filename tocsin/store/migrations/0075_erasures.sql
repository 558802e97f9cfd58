-- pre: tenants that are being erased, and those that were in the last days.
create table erasures (
    tenant_id int primary key,
    slug text not null,
    asked_at timestamptz not null default now(),
    -- Who asked, and whose audit says so: that of the tenant itself goes.
    home_id int not null,
    actor text not null,
    key_id uuid,
    address text,
    request_id text,
    state text not null default 'stopping' check (state in ('stopping', 'erasing', 'erased')),
    -- What has gone so far.
    rows bigint not null default 0,
    objects bigint not null default 0,
    -- Since when nothing of it was found any more, and when it was last looked for.
    empty_since timestamptz,
    looked_at timestamptz,
    erased_at timestamptz
);

-- Who serves asks for an erasure and reads how far it is; only the owner, who takes records away, does it.
grant select, insert on erasures to tocsin_engine;
alter table erasures enable row level security;
alter table erasures force row level security;
create policy engine on erasures to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on erasures to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
