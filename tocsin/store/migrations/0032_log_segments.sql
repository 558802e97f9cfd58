-- pre: log segments, so that logs can be searched and compacted: what a tenant has in an object of log lines.
create table log_segments (
    tenant_id int not null,
    -- Its time is when its lines were stored: searches go by it, newest first.
    id uuid not null,
    object text not null,
    -- Of its directory in the object: which frames there are, and a filter of the words in them.
    position bigint not null,
    bytes int not null,
    lines int not null,
    -- Bytes of its lines before and after compression.
    raw_bytes bigint not null,
    stored_bytes bigint not null,
    -- When its lines were written, by their workers' clocks.
    first_at timestamptz not null,
    last_at timestamptz not null,
    -- Frames, by their positions, that another shipment of the same lines was quicker to store.
    void bigint[] not null default '{}',
    compacted boolean not null default false,
    added_at timestamptz not null default now(),
    -- By a compacted one; it stays for a while, for searches that have begun before.
    replaced_at timestamptz,
    primary key (tenant_id, id)
);
create index log_segments_object on log_segments (object);
create index log_segments_loose on log_segments (tenant_id, id) where not compacted and replaced_at is null;

grant select, insert, update, delete on log_segments to tocsin_engine;
grant select on log_segments to tocsin_app;
alter table log_segments enable row level security;
alter table log_segments force row level security;
create policy engine on log_segments to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on log_segments to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);

-- Objects of log lines that are to be removed, from a time on, unless something has come to need them.
create table log_garbage (
    object text primary key,
    due_at timestamptz not null
);
grant select, insert, update, delete on log_garbage to tocsin_engine;
