-- post: who else may use a pool is not a tenant's to know.
revoke select on pools from tocsin_app;
grant select (name, version, policy, head_start, paused_at, claimed) on pools to tocsin_app;
