-- :name pending
-- Whether a turn would find anything to do. Not `exists`, which any index would do for, read from end to end.
select s.gaps <> '[]' or s.epoch <> c.restored
       or (select a.id from audit a where a.id > s.high order by a.id limit 1) is not null
  from audit_sealer s, cluster c

-- :name take
-- Whoever holds this row seals; others pass.
select s.high, s.gaps::text as gaps, s.epoch, c.restored,
       pg_snapshot_xmin(pg_current_snapshot())::text::bigint as oldest,
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next,
       (extract(epoch from now()) * 1000000)::bigint as micros
  from audit_sealer s, cluster c
   for update of s skip locked

-- :name new
-- In a statement after `take`: what the last holder sealed is seen. `next`: above whoever is still to come.
select a.tenant_id,
-- :include said
       , pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next
  from audit a
 where a.id > $1
 order by a.id
 limit $2

-- :name late
-- What has come out of the gaps meanwhile.
select a.tenant_id, a.id, a.micros, a.actor, a.key_id, a.action, a.target, a.detail, a.before, a.after, a.address,
       a.request_id
  from unnest($1::bigint[], $2::bigint[]) as g(first, last)
 cross join lateral (
        select a.tenant_id,
-- :include said
          from audit a
         where a.id between g.first and g.last
         order by a.id
         limit $3) a

-- :name heads
select h.tenant_id, h.seq, h.hash
  from unnest($1::int[]) as t(id)
 cross join lateral (
        select * from audit_heads h where h.tenant_id = t.id limit 1) h

-- :name chain
insert into audit_chain (tenant_id, seq, audit_id, hash)
select * from unnest($1::int[], $2::bigint[], $3::bigint[], $4::bytea[])

-- :name advance
insert into audit_heads (tenant_id, seq, hash)
select * from unnest($1::int[], $2::bigint[], $3::bytea[])
    on conflict (tenant_id) do update
   set seq = excluded.seq, hash = excluded.hash,
       waiting_since = case when audit_heads.anchored_seq < audit_heads.seq then audit_heads.waiting_since
                            else now() end

-- :name note_restore
-- What follows in each chain follows the record that the backup left.
update audit_heads set restores = restores || jsonb_build_array(jsonb_build_array($1::int, seq))

-- :name put_back
update audit_sealer set high = $1, gaps = $2, epoch = $3

-- :name due_anchors
-- Heads that are not anchored, once a minute each, and every $3 seconds the heads that have not moved: a series of
-- anchors that ends long ago was cut off. A server has a minute for each head. The head that was tried longest ago
-- comes first, so that slow storage starves no tenant. No rows while older records remain to be sealed, for example
-- after an upgrade: an anchor also states that there were no other records.
with due as materialized (
    select h.tenant_id from audit_heads h
     where (h.anchored_seq < h.seq or h.beat_at is null or h.beat_at <= now() - $3 * interval '1 second')
       and (h.anchored_at is null or h.anchored_at <= now() - $2 * interval '1 second')
       and coalesce((select a.at from audit a where a.id > (select s.high from audit_sealer s) order by a.id limit 1)
                        > now() - interval '1 minute', true)
     order by h.anchored_at nulls first, h.tenant_id
     limit $1
       for update skip locked
)
update audit_heads h
   set anchored_at = now()
  from due d
 where h.tenant_id = d.tenant_id
returning h.tenant_id, h.seq, h.hash, now() as at, h.anchor_number, h.anchor_line, (select restored from cluster) as epoch

-- :name anchored
-- $3: the number of the anchor, $4: the digest of its line.
update audit_heads
   set anchored_seq = greatest(anchored_seq, $2), waiting_since = case when seq > $2 then now() end,
       anchor_number = $3, anchor_line = $4, beat_at = now()
 where tenant_id = $1 and anchor_number < $3

-- :name anchor_age
select coalesce(extract(epoch from max(now() - h.waiting_since)), 0)::float8
  from audit_heads h
 where h.anchored_seq < h.seq
