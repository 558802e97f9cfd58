-- A cursor is found by its job's id in a hash index: a tree would grow by a level for every few hundred times as many
-- schedules, and be written at every fire. That there is one cursor a job is kept by the job's lock.
create index triggers_job on triggers using hash (job_id);

-- Schedules with `max_runs`: how many occurrences were claimed or are still to be (`used`), and, once there may be no
-- more, where the cursor stood (`parked`). Written under the trigger's lock.
create table run_counts (
    tenant_id int not null,
    job_id uuid not null,
    used int not null default 0,
    parked timestamptz,
    primary key (tenant_id, job_id),
    foreign key (tenant_id, job_id) references jobs on delete cascade
);

-- Occurrences of such schedules that ended unclaimed, so that they do not count: whoever ends one holds the run and must
-- not wait for the trigger. The planner takes them up.
create table unclaimed (
    tenant_id int not null,
    job_id uuid not null
);
create index unclaimed_job on unclaimed (tenant_id, job_id);

-- By which rules of its time zone a schedule's cursor was set: the zone, what its file holds, and the release it came in.
alter table jobs add column zone_rules text collate "C";
create index jobs_zone_rules on jobs (zone_rules) where zone_rules is not null and state in ('active', 'paused');

grant select, insert, update, delete on run_counts, unclaimed to tocsin_engine, tocsin_app;

do $$
declare t text;
begin
    foreach t in array array['run_counts', 'unclaimed'] loop
        execute format('alter table %I enable row level security', t);
        execute format('alter table %I force row level security', t);
        execute format('create policy engine on %I to tocsin_engine, tocsin_owner using (true) with check (true)', t);
        execute format($p$create policy tenant on %I to tocsin_app
            using (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)
            with check (tenant_id = nullif(current_setting('tocsin.tenant', true), '')::int)$p$, t);
    end loop;
end $$;
