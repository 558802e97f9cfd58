-- pre: hosts and networks within our own walls that a tenant's http jobs may call.
alter table tenants add column http_allow text[] not null default '{}';
