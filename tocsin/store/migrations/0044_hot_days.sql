-- pre: a tenant may have its runs in the database for another time than others, and leave a day before they do.

alter table tenants add column hot_days int check (hot_days between 2 and 3650);

-- Since when a file is read by itself; null: from when on its whole day is (`archived_days`). Servers that do not know
-- this find whole days only, so no file comes to be in use by itself while one of them lives.
alter table archives add column cold_at timestamptz;
