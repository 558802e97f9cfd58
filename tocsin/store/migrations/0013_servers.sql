-- pre: servers say that they live and how new they are, so that what only old ones need can go when the last has gone.
create table servers (
    id uuid primary key,
    name text not null,
    version text not null,
    newest_migration text not null,
    started_at timestamptz not null default now(),
    seen_at timestamptz not null default now()
) with (fillfactor = 50);

grant select, insert, update, delete on servers to tocsin_engine;
