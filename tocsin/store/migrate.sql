-- :name ledger
create schema if not exists tocsin;
create table if not exists tocsin.migrations (
    name text primary key,
    digest text not null,
    applied_at timestamptz not null default now()
);

-- :name lock
select pg_advisory_xact_lock(hashtext('tocsin.migrate'))

-- :name applied
select name, digest from tocsin.migrations order by name

-- :name record
insert into tocsin.migrations (name, digest) values ($1, $2)

-- :name current
select count(*) from tocsin.migrations where name = any($1::text[])
