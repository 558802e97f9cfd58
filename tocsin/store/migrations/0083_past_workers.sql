-- pre: what workers offered that are gone, for reports on months: their rows go after a week.
create table past_workers (
    id uuid primary key,
    name text not null,
    pool text not null,
    slots int not null,
    registered_at timestamptz not null,
    gone_at timestamptz not null
);
create index past_workers_gone on past_workers (gone_at);

grant select, insert, delete on past_workers to tocsin_engine;
