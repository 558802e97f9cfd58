-- pre: a pool may be kept to some tenants. Null: it is open to all.
alter table pools add column tenants int[];
-- Nearly always empty: every claim looks into it.
create index pools_closed on pools (name) where tenants is not null;
