-- pre: workflow runs that want something done are found by an index of their own.
create index runs_heads on runs (id)
    where worker_id = '00000000-0000-7000-8000-000000000001'
      and (pending_parents is null or pending_parents = 0 or state = 'stopping');
create index runs_heads_late on runs (deadline_at)
    where worker_id = '00000000-0000-7000-8000-000000000001' and state = 'running' and pending_parents > 0;
