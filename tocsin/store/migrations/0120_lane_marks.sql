-- pre: servers read the lanes that have changed, a tenant makes a bounded number, and those that nobody uses go.
alter table lanes
    -- The transaction that made or retired the lane, or took it back into use. A server reads from the oldest transaction
    -- that was open when it read last: numbers are handed out before the commit, in another order.
    add column changed xid8 not null default '0',
    -- When a job or a run was last seen that goes through it.
    add column seen_at timestamptz not null default now(),
    -- The tenant that needed it first.
    add column made_by int;

create index lanes_changed on lanes (changed);
create index lanes_made_by on lanes (made_by) where made_by is not null;

create function stamp_lane() returns trigger language plpgsql as $$
begin
    new.changed := pg_current_xact_id();
    return new;
end $$;

create trigger stamp_lane before insert or update of retired_at on lanes
    for each row execute function stamp_lane();

-- How far the servers have looked which lanes are in use: page by page through all jobs, then through all live runs. One row.
create table lane_pass (
    one boolean primary key default true check (one),
    began_at timestamptz not null default now(),
    part text not null default 'jobs' check (part in ('jobs', 'runs', 'done')),
    -- The last job or run that was looked at.
    at_tenant int not null default 0,
    at_id uuid not null default '00000000-0000-0000-0000-000000000000'
);
insert into lane_pass default values;
grant select, update on lane_pass to tocsin_engine;
