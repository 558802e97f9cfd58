-- Run as the owner, one server at a time: nobody else may take a record out of the audit.

-- :name older_servers
-- They would miss what is in files.
select exists (select from servers where newest_migration < '0041' and seen_at > now() - interval '1 minute')

-- :name wave
select h.tenant_id from audit_heads h where h.tenant_id > $1 order by h.tenant_id limit $2

-- :name tenants
-- The tenants of $2 whose first record in the database is older than the days it must keep, and where their files end.
-- $1: the first day that is kept for tenants without a setting of their own.
select h.tenant_id, h.anchored_seq, d.before, coalesce(f.last_seq, 0) as seq, f.last_hash as hash, f.checksum
  from audit_heads h
  join tenants t on t.id = h.tenant_id
 cross join lateral (
        select coalesce((now() at time zone 'UTC')::date - t.hot_days, $1::date) as before) d
  left join lateral (
        select f.last_seq, f.last_hash, f.checksum from audit_archives f
         where f.tenant_id = h.tenant_id order by f.first_seq desc limit 1) f on true
 cross join lateral (
        select c.audit_id from audit_chain c
         where c.tenant_id = h.tenant_id and c.seq = coalesce(f.last_seq, 0) + 1 limit 1) c
  left join audit a on a.id = c.audit_id
 where h.tenant_id = any($2::int[]) and h.anchored_seq > coalesce(f.last_seq, 0) and coalesce(a.at < d.before, true)
 order by h.tenant_id

-- :name times
-- Of the records behind $2 up to $3; null where one is gone.
select c.seq, c.audit_id, a.at
  from audit_chain c
  left join audit a on a.id = c.audit_id
 where c.tenant_id = $1 and c.seq > $2 and c.seq <= $3
 order by c.seq
 limit $4

-- :name rows
-- Of the records $2 to $3, in the order of COLUMNS; $4: the file before.
select c.tenant_id, c.seq, a.id, a.at at time zone 'UTC', a.actor, a.key_id::text, a.action, a.target, a.detail::text,
       encode(a.before, 'hex'), encode(a.after, 'hex'), a.address, a.request_id, encode(c.hash, 'hex'), $4::text
  from audit_chain c
  join audit a on a.id = c.audit_id
 where c.tenant_id = $1 and c.seq >= $2 and c.seq <= $3
 order by c.seq

-- :name hash
select c.hash from audit_chain c where c.tenant_id = $1 and c.seq = $2

-- :name add
insert into audit_archives (tenant_id, first_seq, last_seq, last_hash, last_id, day, first_at, last_at, object, bytes,
                            checksum, previous)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)

-- :name unfinished
-- Files that are read already, whose records still lie in the database.
select f.tenant_id, f.first_seq from audit_archives f where f.gone_at is null order by f.tenant_id, f.first_seq

-- :name remove
-- What a file holds, and no more.
with places as (
    delete from audit_chain c
     using audit_archives f
     where f.tenant_id = $1 and f.first_seq = $2 and f.gone_at is null
       and c.tenant_id = f.tenant_id and c.seq >= f.first_seq and c.seq <= f.last_seq
    returning c.audit_id
), records as (
    delete from audit a using places p where a.id = p.audit_id and a.tenant_id = $1 returning a.id
)
update audit_archives f
   set gone_at = now()
 where f.tenant_id = $1 and f.first_seq = $2 and f.gone_at is null
   and f.last_seq - f.first_seq + 1 = all (array[(select count(*) from places), (select count(*) from records)])
returning true
