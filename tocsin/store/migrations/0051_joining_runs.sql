-- pre: the runs that wait for runs of other jobs are found without looking at any other.
create index runs_joining on runs (id) where state = 'waiting' and blocked_by = 'parent' and join_key is not null;
