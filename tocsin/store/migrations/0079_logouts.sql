-- pre: who logs out everywhere: sessions that a person began before that instant are over.
-- A session is a cookie, and not stored; this is, one row for each of those few who ever did so.
create table logouts (
    key_id uuid primary key,  -- what stands for the person where others have a key
    not_before timestamptz not null
);

grant select, insert, update on logouts to tocsin_engine;
