-- :name take
-- Until the session ends, however it does.
select bool_and(pg_try_advisory_lock(hashtext('tocsin.' || w))) from unnest($1::text[]) as w
