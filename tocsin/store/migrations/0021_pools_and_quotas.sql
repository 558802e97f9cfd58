-- pre: pools have a policy and may be paused; tenants have quotas.
alter table pools
    add column version int not null default 1,
    add column policy text not null default 'fair' check (policy in ('fair', 'priority', 'fifo')),
    add column paused_at timestamptz,
    -- How many runs were handed out so far, by all servers: what a pool's rates are read from.
    add column claimed bigint not null default 0;

alter table tenants
    add column max_jobs int check (max_jobs >= 0),
    add column max_queued int check (max_queued >= 0),
    add column max_running int check (max_running >= 0),
    add column submit_rate text,
    add column log_bytes_per_day bigint check (log_bytes_per_day >= 0);

-- How much a tenant with a quota has logged on its last day.
create table log_usage (
    tenant_id int primary key references tenants,
    day date not null,
    bytes bigint not null
) with (fillfactor = 50);

grant select, insert, update, delete on log_usage to tocsin_engine;
grant select on log_usage to tocsin_app;
alter table log_usage enable row level security;
alter table log_usage force row level security;
create policy engine on log_usage to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on log_usage to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);
