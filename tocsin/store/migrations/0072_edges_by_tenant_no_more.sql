-- post: edges are not found by the tenant first any more (0071_edges_by_job.sql).
alter table dependencies
    drop constraint dependencies_pkey,
    add constraint dependencies_pkey primary key using index dependencies_parent;
drop index dependencies_child;
alter index dependencies_of_child rename to dependencies_child;
