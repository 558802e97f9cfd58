-- :name existing
select c.relname::text as name
  from pg_inherits i
  join pg_class c on c.oid = i.inhrelid
 where i.inhparent = 'history'::regclass

-- :name oldest_live
-- The oldest run that has not ended.
select r.id::text
  from tenants t
 cross join lateral (select r.id from runs r where r.tenant_id = t.id order by r.id limit 1) r
 order by r.id
 limit 1

-- :name unmade
-- The days among these that have no partition and are not read from files.
select d.day
  from unnest($1::date[]) as d(day)
 where not exists (select from archived_days a where a.day = d.day)
   and not exists (select from pg_inherits i
                    where i.inhparent = 'history'::regclass
                      and i.inhrelid = to_regclass('history_' || to_char(d.day, 'YYYYMMDD')))

-- :name lock
select pg_advisory_xact_lock(hashtext('tocsin.partitions'))

-- :name make
-- LIKE and ATTACH instead of PARTITION OF: attaching takes no lock that a report would wait for.
create table if not exists $NAME (like history including all);
alter table history attach partition $NAME for values from ('$FROM') to ('$TO');
