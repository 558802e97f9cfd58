-- pre: servers find out at their start whether they have the same object storage.

-- The id of the marker that lies there; null until the first server that knows of it starts.
alter table cluster add column objects_id uuid;
