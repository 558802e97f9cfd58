-- Jobs by their id alone. The planner looks up the job of each due cursor, wherever it lies: in a hash index that costs
-- the same among ten thousand jobs and ten million, while the primary key's tree grows by two levels.
create index jobs_by_id on jobs using hash (id);
