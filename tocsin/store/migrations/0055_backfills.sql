-- pre: backfills: past ranges of jobs' schedules as runs, so many at a time.
create table backfills (
    tenant_id int not null,
    id uuid not null,
    job_id uuid not null,
    state text not null default 'running' check (state in ('running', 'paused', 'completed', 'cancelled')),
    from_at timestamptz not null,
    to_at timestamptz not null,
    -- What its occurrences follow from, as it was when it was asked for (JSON).
    plan text not null,
    -- The first occurrence without a run; null: all have one. Moved in the transaction that makes the runs.
    next_at timestamptz,
    total int not null,
    made int not null default 0,
    succeeded int not null default 0,
    failed int not null default 0,
    cancelled int not null default 0,
    -- The first runs that failed (JSON): id, the instant they stand for, state.
    failures text not null default '[]',
    max_concurrency int not null,
    priority int not null,
    args text,
    created_at timestamptz not null default now(),
    finished_at timestamptz,
    primary key (tenant_id, id),
    foreign key (tenant_id, job_id) references jobs on delete cascade
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500);
create index backfills_job on backfills (tenant_id, job_id, id);
create index backfills_open on backfills (tenant_id, id) where state in ('running', 'paused');

-- Runs of backfills that have ended: whoever ends one holds the run and must not wait for the backfill. The backfiller
-- takes them up. Few at any time.
create table backfill_ends (
    tenant_id int not null,
    backfill_id uuid not null,
    run_id uuid not null,
    logical_at timestamptz not null,
    state text not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
create index backfill_ends_of on backfill_ends (tenant_id, backfill_id);

-- The instant that the run stood for, and that one made of it stands for.
alter table dead_letters add column logical_at timestamptz;

alter table runs add column backfill_id uuid;
-- The second wall behind the cursor; and by it those that live are counted.
create unique index runs_backfill on runs (tenant_id, backfill_id, logical_at) where backfill_id is not null;

grant select, insert, update, delete on backfills, backfill_ends to tocsin_engine, tocsin_app;

do $$
declare t text;
begin
    foreach t in array array['backfills', 'backfill_ends'] loop
        execute format('alter table %I enable row level security', t);
        execute format('alter table %I force row level security', t);
        execute format('create policy engine on %I to tocsin_engine, tocsin_owner using (true) with check (true)', t);
        execute format($p$create policy tenant on %I to tocsin_app
            using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
            with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)$p$, t);
    end loop;
end $$;

-- A key that is kept to some jobs sees the backfills of those alone (0061_scoped_keys.sql).
create policy scope on backfills as restrictive to tocsin_app
    using (coalesce(current_setting('tocsin.scope', true), '') = ''
           or exists (select from jobs j where j.tenant_id = backfills.tenant_id and j.id = backfills.job_id));
