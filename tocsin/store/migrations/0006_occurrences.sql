-- What a job owed, and what became of it, is told from history: so a counted row says which stretch it stands for, and
-- a version that was replaced says which instants were its own.

-- The first instant of a counted row, `scheduled_for` being the last; null: the row stands for one instant.
alter table history add column first_for timestamptz;
create index history_occurrence on history (job_id, coalesce(first_for, scheduled_for), run_id)
    where trigger = 'schedule' and final;
create index history_counted on history (job_id, first_for) where first_for is not null;

-- Where its schedule counted from; up to when it owed, and after when its successor did. Null where the successor owes
-- the same instants. Of versions from before this migration nobody knows the anchor.
alter table job_versions
    add column anchor timestamptz,
    add column owed_until timestamptz,
    add column successor_after timestamptz;
update job_versions set owed_until = replaced_at, successor_after = replaced_at;
