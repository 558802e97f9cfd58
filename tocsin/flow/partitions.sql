-- :name existing
select c.relname::text as name
  from pg_inherits i
  join pg_class c on c.oid = i.inhrelid
 where i.inhparent = 'history'::regclass

-- :name lock
select pg_advisory_xact_lock(hashtext('tocsin.partitions'))

-- :name make
-- LIKE and ATTACH instead of PARTITION OF: attaching takes no lock that a report would wait for.
create table if not exists $NAME (like history including all);
alter table history attach partition $NAME for values from ('$FROM') to ('$TO');
