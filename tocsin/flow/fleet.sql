-- :name register
insert into workers (id, key_id, name, pool, slots, labels, targets, functions, version, lease_until, resources, serves)
values ($1, $2, $3, $4, $5, $6::jsonb, $7::text[], $8::text[], $9, now() + $10 * interval '1 second', $11::int[], $12::int[])

-- :name came_back
-- The process of a lost worker still runs: it did not go down.
update workers set went_down = false where id = $1 and key_id = $2 and went_down

-- :name pool
insert into pools (name) values ($1) on conflict do nothing

-- :name renew
-- A worker that was declared gone stays gone: it is not answered, and must come back as a new one.
update workers w
   set lease_until = now() + $2 * interval '1 second'
  from unnest($1::uuid[]) as n(id)
 where w.id = n.id and w.state <> 'gone'
returning w.id::text as id, w.state, coalesce(pg_sequence_last_value('claim_ids'), 0) as last_claim

-- :name find
select id::text as id, pool, targets, functions, state, slots, extract(epoch from lease_until - now())::float8, resources,
       labels::text
  from workers
 where id = $1 and key_id = $2 and state <> 'gone'

-- :name was_here
select true from workers where id = $1 and key_id = $2

-- :name list
select w.id::text as id, w.name, w.pool, w.state, w.slots, w.labels::text as labels, w.targets, w.functions, w.version,
       w.lease_until, w.registered_at, w.gone_at,
       -- A tenant sees what runs there of its own only.
       (select count(*) from runs r
         where r.worker_id = w.id and r.state in ('running', 'stopping') and ($4::int is null or r.tenant_id = $4))
           as running,
       w.resources, u.used, u.mine
  from workers w
 cross join lateral (
        select array[coalesce(sum(r.needs[1]), 0), coalesce(sum(r.needs[2]), 0), coalesce(sum(r.needs[3]), 0),
                     coalesce(sum(r.needs[4]), 0)]::bigint[] as used,
               array[coalesce(sum(r.needs[1]) filter (where r.tenant_id = $5), 0),
                     coalesce(sum(r.needs[2]) filter (where r.tenant_id = $5), 0),
                     coalesce(sum(r.needs[3]) filter (where r.tenant_id = $5), 0),
                     coalesce(sum(r.needs[4]) filter (where r.tenant_id = $5), 0)]::bigint[] as mine
          from runs r
         where r.worker_id = w.id and r.needs is not null and r.state in ('running', 'stopping')) u
 -- Who holds the workflow runs is nobody.
 where w.id <> '00000000-0000-7000-8000-000000000001' and ($1::uuid is null or w.id < $1) and ($2::uuid is null or w.id = $2)
   and ($2::uuid is not null or w.state <> 'gone' or w.gone_at > now() - interval '10 minutes')
   -- Who works for others alone is not a tenant's to see: names, labels and functions tell of them.
   and ($4::int is null
        or (w.serves is null or $4 = any(w.serves))
           and not exists (select from pools p where p.name = w.pool and $4 <> all (p.tenants)))
 order by w.id desc
 limit $3

-- :name drain
update workers set state = 'draining' where id = $1 and state = 'live' and id <> '00000000-0000-7000-8000-000000000001'

-- :name leave
-- Only one that holds nothing may leave: what was claimed for it this very moment is taken back when its lease ends.
update workers w
   set state = 'gone', gone_at = now()
 where w.id = $1 and w.state <> 'gone'
   and not exists (select from runs r where r.worker_id = w.id and r.state in ('running', 'stopping'))

-- :name live
select count(*) from workers where state <> 'gone' and lease_until > now() and id <> '00000000-0000-7000-8000-000000000001'

-- :name leaked
select count(*)
  from workers w
 cross join lateral (select from runs r where r.worker_id = w.id and r.state in ('running', 'stopping') offset 0) r
 where w.state = 'gone'

-- :name prune
-- Workers that are long gone and hold nothing, some at a time. Their offers are kept for as long as a report may use
-- them.
with gone as (
    delete from workers
     where id in (select w.id from workers w
                    left join lateral (
                         select true as holds from runs r
                          where r.worker_id = w.id and r.state in ('running', 'stopping')
                          limit 1) r on true
                   where w.state = 'gone' and w.gone_at < now() - interval '7 days' and r.holds is null
                   order by w.gone_at
                   limit 1000)
    returning id, name, pool, slots, registered_at, gone_at
), old as (
    delete from past_workers where gone_at < now() - interval '400 days'
)
insert into past_workers (id, name, pool, slots, registered_at, gone_at)
select * from gone
    on conflict do nothing
