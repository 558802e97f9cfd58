-- pre: an occurrence that waits while a worker lives is late; one that found no worker is a misfire.

-- For lanes with late occurrences: a worker that may take from the lane. While it lives, the lane has had a worker since it
-- registered. Written by the sweep, for claims.
create table lane_vouchers (
    lane_id int primary key,
    worker_id uuid not null
);
grant select, insert, update, delete on lane_vouchers to tocsin_engine;

-- The last time that a pool was paused, or a tenant was suspended, and has gone on since: nobody took anything then.
alter table pools add column paused_from timestamptz, add column paused_until timestamptz;
alter table tenants add column suspended_from timestamptz, add column suspended_until timestamptz;
