-- pre: runs that wait are found by what they wait for, and by lane; runs that were let go are counted until they start.
-- Of a job with a million runs that wait for its limit, the first that waits for a rate or an earlier run is one probe away.
create index runs_parked on runs (blocked_key, blocked_by, order_key) where state = 'waiting' and blocked_key is not null;
create index runs_parked_in on runs (blocked_key, blocked_by, lane_id, order_key)
    where state = 'waiting' and blocked_by in ('limit', 'rate');
-- A run that waited for a limit keeps the limit's key while it is ready.
create index runs_let_go on runs (blocked_key, lane_id) where state = 'ready' and blocked_key is not null;
-- Occurrences that replace the run before them, and that no worker was free to claim.
create index runs_replacing on runs (ready_at, id)
    where overlap = 'replace' and trigger = 'schedule' and attempt = 0 and state in ('staged', 'ready');
