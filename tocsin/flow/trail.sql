-- :name head
-- The last record, in the database or in a file.
select * from (
    (select c.seq, c.hash from audit_chain c where c.tenant_id = $1 order by c.seq desc limit 1)
    union all
    (select f.last_seq, f.last_hash from audit_archives f where f.tenant_id = $1 order by f.first_seq desc limit 1)) h
 order by seq desc
 limit 1

-- :name at
select a.at
  from audit_chain c
 cross join lateral (select a.at from audit a where a.id = c.audit_id limit 1) a
 where c.tenant_id = $1 and c.seq = $2

-- :name list
-- Down from below $2, but not below $3: what fits is looked for among so many records only.
select c.seq, c.hash,
-- :include said
       , a.at
  from (select c.seq, c.hash, c.audit_id from audit_chain c
         where c.tenant_id = $1 and c.seq < $2 and c.seq >= $3
         order by c.seq desc) c
 cross join lateral (
        select * from audit a where a.id = c.audit_id limit 1) a
 where ($4::text is null or a.actor = $4)
   and ($5::text is null or a.action = $5)
   and ($6::text is null or a.target = $6)
   and ($7::timestamptz is null or a.at >= $7)
   and ($8::timestamptz is null or a.at < $8)
 order by c.seq desc
 limit $9

-- :name links
-- Records with their place in the chain, and places whose record is gone.
select c.seq, c.hash, c.audit_id, a.at,
-- :include said
  from (select * from audit_chain c where c.tenant_id = $1 and c.seq > $2 order by c.seq limit $3) c
  left join lateral (
        select * from audit a where a.id = c.audit_id and a.tenant_id = $1 limit 1) a on true
 order by c.seq

-- :name sealer
select s.high, s.gaps::text as gaps from audit_sealer s

-- :name unchained
-- Records that the sealer has passed by and that have no place.
select a.id
  from audit a
 where a.tenant_id = $1 and a.id > $2 and a.id <= $3
   and not exists (select from audit_chain c where c.audit_id = a.id)
   and not exists (select from unnest($4::bigint[], $5::bigint[]) as g(first, last) where a.id between g.first and g.last)
 order by a.id
 limit $6

-- :name unsealed
-- Records that the sealer has not come to yet, counted up to $3.
select count(*)::int from (select from audit a where a.tenant_id = $1 and a.id > $2 limit $3) a

-- :name hashes
select c.seq, c.hash from audit_chain c where c.tenant_id = $1 and c.seq = any($2::bigint[])

-- :name moment
-- The sealer's epoch is the one of the database's last restore.
select now() as at, s.epoch from audit_sealer s

-- :name notebook
select h.seq, h.hash, h.anchored_seq, h.restores::text as restores from audit_heads h where h.tenant_id = $1

-- :name terms
-- Up to which record the chain has expired, when, and for how many days records were to be kept then. $2: of tenants that
-- do not say, where a server of the release before did not note it.
select f.last_seq, f.last_at, least(f.expired_at, now()) as expired_at,
       coalesce(f.expired_days, t.audit_days, $2)::int as days
  from audit_archives f
  join tenants t on t.id = f.tenant_id
 where f.tenant_id = $1 and f.expired_at is not null
 order by f.first_seq desc
 limit 1
