-- An index over all rows of schedules made each of them a third dearer to write. Nearly all are found by their ids, which
-- hold the instant they stand for; only those that began late, by jitter or after retries, too, need one of their own.
drop index history_occurrence;
create index history_late on history (job_id, scheduled_for, run_id)
    where trigger = 'schedule' and final and first_for is null and ready_at - scheduled_for > interval '1 minute';
