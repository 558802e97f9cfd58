-- :name open
-- Let what changes be written down for these tenants, from the moment this is committed; but for those that are erased.
insert into event_feeds (tenant_id, open_until)
select t.id, now() + $2 * interval '1 second'
  from unnest($1::int[]) as w(id)
 cross join lateral (
        select t.id from tenants t
         where t.id = w.id and not exists (select from erasures e where e.tenant_id = t.id)
         limit 1) t
 order by t.id
    on conflict (tenant_id) do update set open_until = excluded.open_until
returning tenant_id

-- :name begin
-- From when they are complete. In a transaction after `open`: whichever takes a higher number than this one takes it
-- later and has met the feed open in all its writes.
update event_feeds
   set since = pg_current_xact_id()::text::bigint
 where tenant_id = any($1::int[]) and since is null

-- :name read
-- For each tenant the changes from its place on, at most $4 rows, up to the oldest transaction that still runs.
-- A tenant without any is answered once, too.
select w.tenant_id, f.mark, f.since, s.horizon, e.xid, e.seq, e.at, e.subject, e.changes
  from (select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as horizon) s
 cross join unnest($1::int[], $2::bigint[], $3::bigint[]) as w(tenant_id, xid, seq)
  left join lateral (
        select f.mark, f.since from event_feeds f where f.tenant_id = w.tenant_id limit 1) f on true
  left join lateral (
        select e.xid, e.seq, e.at, e.subject, e.changes
          from events e
         where e.tenant_id = w.tenant_id and (e.xid, e.seq) >= (w.xid, w.seq) and e.xid < s.horizon
         order by e.xid, e.seq
         limit $4) e on true
 order by w.tenant_id, e.xid, e.seq

-- :name close
-- Delete at most $1 feeds that were not renewed, with all their rows, and feeds with transaction numbers of another
-- cluster, which come from a restored dump. Returns how many.
with due as materialized (
    select f.tenant_id from event_feeds f
     where f.open_until < now() or f.since > pg_current_xact_id()::text::bigint
     limit $1
       for update skip locked
), closed as (
    delete from event_feeds f where f.tenant_id = any(array(select d.tenant_id from due d))
    returning f.tenant_id
), gone as (
    delete from events e where e.tenant_id = any(array(select c.tenant_id from closed c))
)
select count(*)::int from closed

-- :name trim
-- Of the $4 feeds after $3: delete rows older than $1 seconds and rows beyond the newest $2, by whole transactions. One
-- node does this; the others skip. Returns the last feed, and whether more than $5 rows had to go: then call again for
-- the rest.
with feed as materialized (
    select f.tenant_id, pg_snapshot_xmin(pg_current_snapshot())::text::bigint as horizon
      from event_feeds f
     where f.since is not null and f.tenant_id > $3
     order by f.tenant_id
     limit $4
       for update skip locked
),
cut as materialized (
    select f.tenant_id, greatest(aged.xid, many.xid) as xid
      from feed f
     cross join lateral (
            select max(e.xid) as xid
              from (select e.xid, e.at from events e
                     where e.tenant_id = f.tenant_id and e.xid < f.horizon
                     order by e.xid, e.seq
                     limit $2) e
             where e.at < now() - $1 * interval '1 second') aged
      left join lateral (
            select e.xid from events e
             where e.tenant_id = f.tenant_id and e.xid < f.horizon
             order by e.xid desc, e.seq desc
            offset $2 limit 1) many on true
),
-- Rows that remain for the next call are not readable any more.
old as materialized (
    select e.place
      from cut c
     cross join lateral (
            select e.ctid as place from events e where e.tenant_id = c.tenant_id and e.xid <= c.xid limit $5) e
     limit $5
),
gone as (
    delete from events e using old o where e.ctid = o.place
),
begun as (
    update event_feeds f
       set since = greatest(f.since, c.xid)
      from cut c
     where f.tenant_id = c.tenant_id and c.xid is not null
)
select (select max(f.tenant_id) from feed f) as last, (select count(*) from old) >= $5 as more
