-- pre: what runs take of a worker (processors, memory, disk, gpus), and which workers they would rather have.
-- Amounts are arrays of four: thousandths of a processor, MB of memory, MB of disk, gpus.
alter table workers add column resources int[] not null default '{0,0,0,0}';

alter table lanes
    -- The class of what its runs need, each amount rounded up to a power of two; empty: they take a slot and no more.
    add column needs int[] not null default '{}',
    add column prefer jsonb not null default '{}',
    drop constraint lanes_pool_kind_function_labels_key,
    add constraint lanes_pool_kind_function_labels_key unique (pool, kind, function, labels, needs, prefer);

-- What this run needs, exactly; null: a slot, of whichever worker may have it.
alter table runs add column needs int[];
create index runs_using on runs (worker_id) where needs is not null and state in ('running', 'stopping');
