-- pre: runs that did not succeed are found by their state, outcome and error class, and dead letters by what people ask for.

-- Partial: a success, which is what most reports tell of, writes to none of them.
create index history_state on history (tenant_id, state, run_id) where final and state <> 'succeeded';
create index history_outcome on history (tenant_id, outcome, run_id) where final and outcome <> 'succeeded';
create index history_error_class on history (tenant_id, error_class, run_id) where final and error_class is not null;

create index dead_letters_job on dead_letters (tenant_id, job_id, run_id);
create index dead_letters_error_class on dead_letters (tenant_id, error_class, run_id);

-- Few jobs are in one of these states.
create index jobs_closed on jobs (tenant_id, state, id) where state in ('paused', 'cancelled') and node is null;
