-- pre: runs that depend on other runs, and workflows.
-- A workflow is a job of kind `workflow`, each of its nodes a job, too. Its run (the head) is held by the servers
-- themselves, and its nodes' runs name it.
alter table jobs
    add column workflow_id uuid,
    add column node text,
    -- Other jobs depend on it: what its runs come to decides about theirs.
    add column joins boolean not null default false;
create unique index jobs_node on jobs (tenant_id, workflow_id, node) where workflow_id is not null;

alter table runs
    -- The instant it stands for, where that is not `scheduled_for`.
    add column logical_at timestamptz,
    add column workflow_run_id uuid,
    -- How many runs are still to end before it is decided: its parents; of a head, its nodes. Null: it waits for none.
    add column pending_parents int,
    -- What those that have ended did to it: 0 nothing, 1 it is not needed, 2 it cannot run.
    add column doomed smallint not null default 0,
    -- The runs that wait for this one and, a letter each, for which end: s(uccess), f(ailure), c(ompletion), h(ead).
    add column feeds uuid[],
    add column feeds_on text,
    add column parents uuid[],
    -- One run for each element of a parent's result: where that is (JSON), until they are made.
    add column map text,
    add column joins boolean not null default false,
    -- Which runs of a job's parents belong together, and the job that was run by hand if that began it.
    add column join_key uuid,
    add column chain uuid;
create index runs_workflow on runs (workflow_run_id, id) where workflow_run_id is not null;
create unique index runs_join on runs (job_id, join_key) where join_key is not null;

alter table history
    add column logical_at timestamptz,
    add column workflow_run_id uuid;
create index history_workflow on history (workflow_run_id, run_id) where workflow_run_id is not null;

-- Jobs that wait for other jobs' runs, outside of workflows.
create table dependencies (
    tenant_id int not null,
    parent_id uuid not null,
    child_id uuid not null,
    wants text not null check (wants in ('s', 'f', 'c')),
    -- How many parents the child has; and the one job that all of them follow from, if it is one.
    parents int not null,
    root_id uuid,
    primary key (tenant_id, parent_id, child_id),
    foreign key (tenant_id, parent_id) references jobs on delete cascade,
    foreign key (tenant_id, child_id) references jobs on delete cascade
);
create index dependencies_child on dependencies (tenant_id, child_id);

grant select, insert, update, delete on dependencies to tocsin_engine, tocsin_app;
alter table dependencies enable row level security;
alter table dependencies force row level security;
create policy engine on dependencies to tocsin_engine, tocsin_owner using (true) with check (true);
create policy tenant on dependencies to tocsin_app
    using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
    with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int);

-- Who holds the heads: a worker whose lease never ends, because it is no process. Every server acts for it.
insert into pools (name) values ('workflows') on conflict do nothing;
insert into workers (id, key_id, name, pool, slots, targets, lease_until)
values ('00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000001', 'conductor', 'workflows', 1000000,
        '{workflow}', '9999-01-01');
