-- The core: tenants, jobs, triggers, runs, history, and what guards them.
-- Runs as tocsin_owner with search_path = tocsin.

create table cluster (
    only_row boolean primary key default true check (only_row),
    -- Raised by `tocsin restored` after a backup is restored, so that no fence is ever handed out twice.
    restored int not null default 0,
    token_key bytea not null
);

create sequence claim_ids;

create table tenants (
    id int generated always as identity primary key,
    slug text not null unique check (slug ~ '^[a-z0-9][a-z0-9-]{0,62}$'),
    weight int not null default 1 check (weight between 1 and 1000),
    created_at timestamptz not null default now()
);

create table api_keys (
    id uuid primary key,
    tenant_id int not null references tenants,
    hash bytea not null unique,
    role text not null check (role in ('viewer', 'operator', 'editor', 'admin', 'worker', 'platform')),
    name text not null default '',
    created_at timestamptz not null default now(),
    expires_at timestamptz,
    revoked_at timestamptz
);
create index api_keys_tenant on api_keys (tenant_id, id);

create table pools (
    name text primary key,
    -- How far one point of priority moves a run forward: priority is a head start, so ageing is free.
    head_start interval not null default '20 milliseconds'
);
insert into pools (name) values ('default');

-- Who may take a run, interned: a claim never scans what its workers may not have.
create table lanes (
    id int generated always as identity primary key,
    pool text not null references pools,
    kind text not null,
    function text not null default '',
    labels jsonb not null default '{}',
    unique (pool, kind, function, labels)
);

create table workers (
    id uuid primary key,
    key_id uuid not null,
    name text not null,
    pool text not null references pools,
    slots int not null,
    labels jsonb not null default '{}',
    targets text[] not null default '{}',
    functions text[] not null default '{}',
    version text not null default '',
    state text not null default 'live' check (state in ('live', 'draining', 'gone')),
    lease_until timestamptz not null,
    registered_at timestamptz not null default now(),
    gone_at timestamptz
) with (fillfactor = 50);
create index workers_lease on workers (lease_until) where state <> 'gone';
create index workers_gone on workers (gone_at) where state = 'gone';

create table jobs (
    tenant_id int not null references tenants,
    id uuid not null,
    name text,
    version int not null default 1,
    state text not null default 'active' check (state in ('active', 'paused', 'cancelled', 'completed')),
    spec jsonb not null,
    -- What the steps need of the spec without reading it.
    lane_id int not null references lanes,
    once boolean not null,
    overlap text check (overlap in ('skip', 'queue', 'queue_all')),
    max_concurrency int,
    max_attempts int not null,
    priority int not null,
    start_deadline interval,
    tags jsonb,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    ended_at timestamptz,
    primary key (tenant_id, id)
) with (fillfactor = 80);
create unique index jobs_name on jobs (tenant_id, name) where state in ('active', 'paused');

-- Specs that were replaced; the current one is in jobs.
create table job_versions (
    tenant_id int not null,
    job_id uuid not null,
    version int not null,
    spec jsonb not null,
    replaced_at timestamptz not null default now(),
    primary key (tenant_id, job_id, version)
);

-- One narrow cursor per recurring or future job: rewritten at every fire, so nothing else lives here.
create table triggers (
    tenant_id int not null,
    job_id uuid not null,
    next_fire_at timestamptz,
    held_at timestamptz,
    primary key (tenant_id, job_id),
    foreign key (tenant_id, job_id) references jobs on delete cascade
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);
create index triggers_due on triggers (next_fire_at) where next_fire_at is not null;

-- Paused jobs. Every claim reads it, so pausing a job with 200,000 queued runs is one row.
create table holds (
    tenant_id int not null,
    job_id uuid not null,
    since timestamptz not null default now(),
    primary key (tenant_id, job_id)
);

-- One row per exact running limit; locked before counting, never itself a counter.
create table limits (
    tenant_id int not null,
    key uuid not null,
    max int not null,
    primary key (tenant_id, key)
);

-- Live runs only.
create table runs (
    tenant_id int not null,
    id uuid not null,
    job_id uuid not null,
    job_version int not null,
    lane_id int not null,
    state text not null check (state in ('staged', 'ready', 'waiting', 'running', 'stopping')),
    trigger text not null
        check (trigger in ('schedule', 'manual', 'api', 'dependency', 'backfill', 'retry', 'redrive')),
    priority int not null,
    scheduled_for timestamptz not null,
    ready_at timestamptz not null,
    order_key timestamptz not null,
    deadline_at timestamptz,
    attempt int not null default 0,
    failures int not null default 0,
    losses int not null default 0,
    max_attempts int not null,
    fence bigint not null default 0,
    claim_id bigint,
    worker_id uuid,
    claimed_at timestamptz,
    blocked_by text check (blocked_by in ('parent', 'overlap', 'limit', 'rate', 'breaker', 'paused', 'resources')),
    blocked_key uuid,
    -- Copied from the job's version when the run is made: immutable per run. overlap is null where it does not apply.
    overlap text,
    limited boolean not null default false,
    once boolean not null default false,
    stop_reason text,
    args text,
    tags jsonb,
    origin_run_id uuid,
    primary key (tenant_id, id),
    constraint runs_held_by_worker check ((state in ('running', 'stopping')) = (worker_id is not null)),
    constraint runs_waiting_is_blocked check ((state = 'waiting') = (blocked_by is not null))
) with (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.2,
    autovacuum_vacuum_cost_delay = 0
);
create index runs_ready on runs (lane_id, tenant_id, order_key) where state = 'ready';
create index runs_staged on runs (lane_id, tenant_id, ready_at) where state = 'staged';
create index runs_held on runs (worker_id, id) where state in ('running', 'stopping');
create index runs_waiting on runs (blocked_key, order_key) where state = 'waiting';
create index runs_job on runs (job_id, id);
create index runs_limited on runs (job_id) where limited and state in ('running', 'stopping');
create index runs_deadline on runs (deadline_at) where deadline_at is not null and attempt = 0;
-- The second wall behind the cursor's compare-and-set.
create unique index runs_occurrence on runs (job_id, scheduled_for) where trigger = 'schedule';

-- One row per ended attempt, and one for each run that ended without an attempt of its own.
create table history (
    tenant_id int not null,
    run_id uuid not null,
    attempt int not null,
    job_id uuid not null,
    job_version int not null,
    final boolean not null,
    state text not null,
    outcome text check (outcome in ('succeeded', 'failed', 'timeout', 'lost', 'cancelled')),
    reason text,
    count int not null default 1,
    fence bigint not null,
    trigger text not null,
    priority int not null,
    failures int not null,
    losses int not null,
    max_attempts int not null,
    scheduled_for timestamptz not null,
    ready_at timestamptz not null,
    started_at timestamptz,
    finished_at timestamptz not null,
    worker_id uuid,
    exit_code int,
    error_class text,
    error text,
    usage text,
    result text,
    args text,
    tags jsonb,
    origin_run_id uuid,
    primary key (tenant_id, run_id, attempt),
    constraint history_final_state
        check (not final or state in ('succeeded', 'dead', 'cancelled', 'expired', 'skipped'))
) partition by range (run_id);
create index history_job on history (job_id, run_id);

create table dead_letters (
    tenant_id int not null,
    run_id uuid not null,
    job_id uuid not null,
    job_version int not null,
    died_at timestamptz not null default now(),
    priority int not null,
    error_class text,
    error text,
    args text,
    tags jsonb,
    primary key (tenant_id, run_id)
);

create table idempotency (
    tenant_id int not null,
    key text not null,
    digest bytea not null,
    status int not null,
    ids uuid[] not null,
    version int,
    created_at timestamptz not null default now(),
    primary key (tenant_id, key)
);
create index idempotency_age on idempotency (created_at);

create table audit (
    id bigint generated always as identity primary key,
    tenant_id int not null,
    at timestamptz not null default now(),
    actor text not null,
    key_id uuid,
    action text not null,
    target text not null,
    detail jsonb
);
create index audit_tenant on audit (tenant_id, id);

-- Where the lines of an attempt lie in object storage. No log text in the database.
create table log_chunks (
    tenant_id int not null,
    run_id uuid not null,
    attempt int not null,
    first_line bigint not null,
    lines int not null,
    object text not null,
    position bigint not null,
    bytes int not null,
    primary key (tenant_id, run_id, attempt, first_line)
);

grant usage on schema tocsin to tocsin_engine, tocsin_app;
grant usage on all sequences in schema tocsin to tocsin_engine, tocsin_app;
grant select, insert, update, delete on all tables in schema tocsin to tocsin_engine;
grant select on all tables in schema tocsin to tocsin_app;
revoke select on cluster, workers, lanes, pools, tenants, api_keys from tocsin_app;
grant select on pools, lanes to tocsin_app;
grant insert, update, delete on jobs, job_versions, triggers, holds, limits, runs, dead_letters to tocsin_app;
grant insert on history, audit, idempotency, api_keys to tocsin_app;
grant update (revoked_at) on api_keys to tocsin_app;
grant select on api_keys to tocsin_app;
revoke update, delete on audit from tocsin_engine;

-- The second wall between tenants. The engine's batches cross tenants; a call of one tenant sees one tenant.
do $$
declare t text;
begin
    foreach t in array array['api_keys', 'jobs', 'job_versions', 'triggers', 'holds', 'limits', 'runs', 'history',
                             'dead_letters', 'idempotency', 'audit', 'log_chunks']
    loop
        execute format('alter table %I enable row level security', t);
        execute format('alter table %I force row level security', t);
        execute format('create policy engine on %I to tocsin_engine, tocsin_owner using (true) with check (true)', t);
        execute format($p$create policy tenant on %I to tocsin_app
            using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
            with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)$p$, t);
    end loop;
end $$;

