-- pre: limits that jobs share: a concurrency key (how many of its runs at once) and a rate, of the key or of the job.
alter table jobs
    add column key_id uuid,
    -- Where the key follows from a run's arguments.
    add column key_template text,
    add column key_max int,
    add column rate_gap interval,
    add column rate_burst int,
    drop constraint jobs_overlap_check,
    add constraint jobs_overlap_check check (overlap in ('skip', 'queue', 'queue_all', 'replace'));

alter table runs add column key_id uuid;
create index runs_keyed on runs (key_id) where key_id is not null and state in ('running', 'stopping');

-- When all that a rate has let through would have come at an even pace.
alter table limits add column tat timestamptz;
