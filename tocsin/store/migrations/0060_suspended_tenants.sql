-- pre: tenants may be suspended: nothing new of them starts, and all is kept.
alter table tenants add column suspended_at timestamptz;
-- Nearly always empty: every claim looks into it.
create index tenants_suspended on tenants (id) where suspended_at is not null;
