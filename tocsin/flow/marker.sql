-- :name known
select objects_id::text from cluster

-- :name settle
-- The marker $1 in the place of $2, or of none, unless another server was first; answers which one it is now.
update cluster
   set objects_id = case when objects_id is not distinct from $2::uuid then $1::uuid else objects_id end
returning objects_id::text
