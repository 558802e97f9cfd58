-- pre: which workers went down, and with which run that had lost a worker before.
alter table workers add column went_down boolean not null default false;
alter table workers add column suspect_id uuid;

-- Runs in the hands of workers that a worker before was lost with: none, on most days.
create index runs_suspects on runs (worker_id) where losses > 0 and state in ('running', 'stopping');
