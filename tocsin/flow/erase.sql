-- What is asked and told runs as the engine; the rest as the owner, by one server at a time, while nobody archives.

-- :name lock_tenant
-- A tenant, whether it is being erased, and whether keys of it are good that are nobody's own: the platform's, or workers'.
select t.id, t.legal_hold, e.tenant_id is not null as erasing,
       exists (select from api_keys k
                where k.tenant_id = t.id and k.role in ('platform', 'worker') and k.revoked_at is null
                  and (k.expires_at is null or k.expires_at > now())) as serves
  from tenants t
  left join erasures e on e.tenant_id = t.id
 where t.slug = $1
   for no key update of t

-- :name ask
insert into erasures (tenant_id, slug, home_id, actor, key_id, address, request_id) values ($1, $2, $3, $4, $5, $6, $7)

-- :name suspend
update tenants set suspended_at = coalesce(suspended_at, now()) where id = $1

-- :name revoke
update api_keys set revoked_at = now() where tenant_id = $1 and revoked_at is null

-- :name due
-- Up to $1 erasures: those in progress and, once an hour, finished ones, for data that arrived late. The one that was
-- tried longest ago comes first. The attempt is recorded before it is made, so that a failing one comes after all
-- others.
with due as materialized (
    select e.tenant_id from erasures e
     where e.state <> 'erased' or e.looked_at < now() - interval '1 hour'
     order by e.looked_at nulls first, e.asked_at, e.tenant_id
     limit $1
)
update erasures e set looked_at = now() from due d where e.tenant_id = d.tenant_id returning e.*

-- :name under_way
select exists (select from erasures e where e.state <> 'erased' or e.looked_at < now() - interval '1 hour')

-- :name let_go
-- staged | ready | waiting → as if it had never been: a wave of runs that no worker holds. The servers themselves hold the
-- heads of workflows ($3). With $4, that nobody waits any longer, those too that workers hold: whatever is said of such
-- a run from now on is superseded.
with gone as (
    delete from runs r
     where r.ctid = any (array(
               select f.ctid from runs f
                where f.tenant_id = $1 and (f.state in ('staged', 'ready', 'waiting') or f.worker_id = $3::uuid or $4)
                limit $2))
    returning 1
), counted as (
    update erasures e set rows = e.rows + (select count(*) from gone) where e.tenant_id = $1 and exists (select from gone)
)
select count(*) from gone

-- :name stop
-- running → stopping, a wave of those that workers hold; in the order of reports.
with held as materialized (
    select r.ctid as place from runs r
     where r.tenant_id = $1 and r.state = 'running'
     order by r.id
     limit $2
       for update
)
update runs r
   set state = 'stopping', stop_reason = 'the tenant is erased'
  from held h
 where r.ctid = h.place and r.state = 'running'
returning r.id::text as run_id, r.worker_id::text as worker_id, r.fence

-- :name stopped
-- stopping → erasing, once no run of it is left.
update erasures e set state = 'erasing'
 where e.tenant_id = $1 and e.state = 'stopping' and not exists (select from runs r where r.tenant_id = $1)
returning true

-- :name segments
-- A wave of objects outside of the tenant's folders in which it has lines: where its bytes begin and end, frames first,
-- then their directory; and whether others have lines there.
select s.id::text as id, s.object, s.position - s.stored_bytes as first, s.position + s.bytes as last,
       exists (select from log_segments o where o.object = s.object and o.tenant_id <> $1) as shared
  from log_segments s
 where s.tenant_id = $1 and not s.compacted
 order by s.id
 limit $2

-- :name keep_in_sight
-- Before an object is written anew: if somebody removes it meanwhile, it is to be removed once more.
insert into log_garbage (object, due_at) values ($1, now() + interval '1 hour')
    on conflict (object) do update set due_at = excluded.due_at

-- :name forget_segments
delete from log_segments where tenant_id = $1 and id = any($2::uuid[])

-- :name count_objects
update erasures set objects = objects + $2 where tenant_id = $1

-- :name days
-- Days of history, those too that have left their parent and are not gone yet.
select c.relname::text as name
  from pg_class c
 where c.relnamespace = 'tocsin'::regnamespace and c.relkind = 'r' and c.relname ~ '^history_[0-9]{8}$'
 order by c.relname

-- :name take_rows
-- A wave of a table's rows.
with gone as (
    delete from $TABLE t
     where t.ctid = any (array(select f.ctid from $TABLE f where f.tenant_id = $1 limit $2))
    returning 1
), counted as (
    update erasures e set rows = e.rows + (select count(*) from gone) where e.tenant_id = $1 and exists (select from gone)
)
select count(*) from gone

-- :name looked
-- Answers for how many seconds there was nothing of it.
update erasures e
   set empty_since = case when $2 then null else coalesce(e.empty_since, now()) end
 where e.tenant_id = $1
returning coalesce(extract(epoch from now() - e.empty_since), 0)::float8

-- :name forget_duties
-- Worker keys and workers that may serve this tenant, among others; and the lanes that it created, which others may
-- use.
with lanes_made as (update lanes l set made_by = null where l.made_by = $1),
keys as (update api_keys k set serves = array_remove(k.serves, $1::int) where $1 = any(k.serves))
update workers w set serves = array_remove(w.serves, $1::int) where $1 = any(w.serves)

-- :name forget_tenant
delete from tenants where id = $1

-- :name erased
update erasures set state = 'erased', erased_at = now() where tenant_id = $1 and state = 'erasing' returning rows, objects

-- :name forget_erasure
delete from erasures where tenant_id = $1 and erased_at < now() - $2 * interval '1 second'
