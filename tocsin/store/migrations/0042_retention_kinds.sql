-- pre: how long each tenant's logs and its audit are kept, as it is for its runs.
alter table tenants
    add column logs_days int check (logs_days between 1 and 36500),
    add column audit_days int check (audit_days between 1 and 36500);
