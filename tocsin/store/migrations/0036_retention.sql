-- pre: how long each tenant's records are kept, and whether all of them are held for a court or an auditor.
alter table tenants
    add column runs_days int check (runs_days between 1 and 36500),
    add column legal_hold boolean not null default false;
