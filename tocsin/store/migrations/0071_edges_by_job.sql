-- pre: edges are found by the job first. Led by the tenant, either index would do for either end of them in the planner's
-- eyes, and it read all of a tenant's for one.
create unique index dependencies_parent on dependencies (parent_id, child_id, tenant_id);
create index dependencies_of_child on dependencies (child_id, tenant_id);
