-- pre: a backfill of what is missing or failed alone.
alter table backfills
    add column rerun text not null default 'all' check (rerun in ('all', 'missing', 'failed'));
