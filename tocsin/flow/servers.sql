-- :name enlist
-- Answers how often the database was restored.
with forgotten as (
    delete from servers where seen_at < now() - interval '1 day' and id <> $1
)
insert into servers (id, name, version, newest_migration)
values ($1, $2, $3, $4)
    on conflict (id) do update set seen_at = now()
returning (select restored from cluster)

-- :name leave
delete from servers where id = $1
