-- pre: old records of the audit lie in object storage as Parquet: what each file holds, and how the files follow each other.
create table audit_archives (
    tenant_id int not null,
    -- Which records of the tenant's chain the file holds. There is no gap between one file and the next.
    first_seq bigint not null,
    last_seq bigint not null,
    -- The hash of its last record, which the next one is held to, and the highest row id in it.
    last_hash bytea not null,
    last_id bigint not null,
    day date not null,
    first_at timestamptz not null,
    last_at timestamptz not null,
    -- Null: its retention is over, and it is gone. The newest of those stays, for the chain begins behind it.
    object text,
    bytes bigint not null,
    -- SHA-256 of its bytes; and of those of the file before, which it says itself, too. Zeros before the first.
    checksum bytea not null,
    previous bytea not null,
    created_at timestamptz not null default now(),
    -- Since when its records are gone from `audit`; and since when nobody reads it.
    gone_at timestamptz,
    expired_at timestamptz,
    primary key (tenant_id, first_seq)
);

-- Only the owner writes here, and only he takes records out of `audit`: no role that serves can.
grant select on audit_archives to tocsin_engine, tocsin_app;
alter table audit_archives enable row level security;
alter table audit_archives force row level security;
create policy engine on audit_archives to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on audit_archives to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
