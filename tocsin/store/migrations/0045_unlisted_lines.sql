-- pre: the places of old lines leave the database: the directory of their segment has them, too.

-- The first and the last of the runs that have lines in a segment whose lines have no rows in log_chunks any more.
alter table log_segments add column first_run uuid, add column last_run uuid;
create index log_segments_listed on log_segments (tenant_id, id)
    where compacted and last_run is null and replaced_at is null;
create index log_segments_unlisted on log_segments (tenant_id, last_run)
    where last_run is not null and replaced_at is null;
