-- pre: jobs that say that the arguments of all their runs are sensitive.
alter table jobs add column sensitive boolean not null default false;
