-- pre: the audit says from where and what it was before and after, and every record gets its place in a hash chain.
alter table audit
    -- SHA-256 of the document that the target was, and that it became; null where there is none, or it is secret.
    add column before bytea,
    add column after bytea,
    add column address text,
    add column request_id text;

-- The place of each record among its tenant's, given once it is committed (see flow/seal.py), so that no call waits for
-- another one's. Beside the records and not in them: then nobody needs a right to change what was said.
create table audit_chain (
    tenant_id int not null,
    seq bigint not null,
    audit_id bigint not null unique,
    hash bytea not null,
    primary key (tenant_id, seq)
);

-- Where each chain ends, and up to where that was put into object storage. A notebook of the sealer's, no evidence.
create table audit_heads (
    tenant_id int primary key,
    seq bigint not null,
    hash bytea not null,
    anchored_seq bigint not null default 0,
    anchored_at timestamptz,
    -- Since when there is something that is not anchored.
    waiting_since timestamptz default now(),
    -- [[epoch, seq], …]: the last record that was left each time the database was restored from a backup.
    restores jsonb not null default '[]'
) with (fillfactor = 50);

-- Up to which id records were looked at, and which below it were not there yet: drawn by a transaction that was still
-- running, or had failed. Whoever seals holds this row.
create table audit_sealer (
    only_row boolean primary key default true check (only_row),
    high bigint not null default 0,
    gaps jsonb not null default '[]',
    epoch int not null default 0
) with (fillfactor = 50);
insert into audit_sealer default values;

grant select, insert on audit_chain to tocsin_engine;
grant select, insert, update on audit_heads to tocsin_engine;
grant select, update on audit_sealer to tocsin_engine;
grant select on audit_chain, audit_heads, audit_sealer to tocsin_app;
alter table audit_chain enable row level security;
alter table audit_chain force row level security;
create policy engine on audit_chain to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on audit_chain to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
alter table audit_heads enable row level security;
alter table audit_heads force row level security;
create policy engine on audit_heads to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on audit_heads to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
