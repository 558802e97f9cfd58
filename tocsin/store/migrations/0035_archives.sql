-- pre: days of history that lie in object storage as Parquet: which they are, and what each of their files holds.

-- A day that is here is read from its files, and its partition goes. `gone_at`: since when the partition is gone.
create table archived_days (
    day date primary key,
    archived_at timestamptz not null default now(),
    gone_at timestamptz
);

-- A file holds rows of one tenant and day. `checksum` is of its bytes (SHA-256). `expired_at`: its retention is over, and
-- nobody reads it any more; the row goes when the object has gone.
create table archives (
    tenant_id int not null,
    day date not null,
    object text not null,
    rows bigint not null,
    bytes bigint not null,
    checksum bytea not null,
    created_at timestamptz not null default now(),
    expired_at timestamptz,
    primary key (tenant_id, day, object)
);
create index archives_day on archives (day);

grant select, insert, update, delete on archived_days, archives to tocsin_engine;
grant select on archived_days, archives to tocsin_app;

alter table archives enable row level security;
alter table archives force row level security;
create policy engine on archives to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on archives to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
