-- pre: what fell due during an outage is told apart from what is late because there was much to do.

-- When a planner of any server last completed a turn.
create table planner (
    only_row boolean primary key default true check (only_row),
    turned_at timestamptz not null
) with (fillfactor = 50);
insert into planner (turned_at) values (now());

-- Spans of more than a minute in which no planner completed a turn. The end is excluded.
create table outages (
    from_at timestamptz primary key,
    to_at timestamptz not null
);
create index outages_end on outages (to_at);

grant select, insert, update, delete on planner, outages to tocsin_engine;

-- A cursor that a turn had to skip waits for something: newer rules of its time zone, a calendar, or a mended row. What
-- falls due from `unplanned_since` until it is planned is a misfire.
-- A cursor with `kept_until` owes more than its share of a turn; its occurrences before that instant were judged and are
-- to run.
alter table triggers
    add column unplanned_since timestamptz,
    add column waits_for text collate "C",
    add column kept_until timestamptz;

-- The planner takes cursors from one of these three, so that none of them hides another.
create index triggers_next on triggers (next_fire_at)
    where next_fire_at is not null and kept_until is null and waits_for is null;
create index triggers_behind on triggers (job_id) where kept_until is not null and waits_for is null;
create index triggers_waiting on triggers (waits_for, job_id) where waits_for is not null;
