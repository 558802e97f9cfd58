-- :name look
-- How many are not closed, in how many seconds the next one is due, and whether canaries are under way.
select count(*) filter (where c.state <> 'closed')::int as open,
       extract(epoch from min(c.next_at) - now())::float8 as wait,
       coalesce(bool_or(c.state = 'half_open'), false) as probing
  from (select c.state, c.next_at from circuits c where c.state <> 'closed' or c.next_at is not null) c

-- :name due
-- Those whose turn it is, taken; whoever is at one already does it. A canary that has ended did so in the commit that
-- counted it.
select c.tenant_id, c.id::text as id, c.name, c.policy, c.state, c.since, c.by_hand, c.recent, c.trips, c.wave, c.sent,
       c.good, c.bad, c.next_at, now() as now,
       (select count(*) from runs r where r.circuit_id = c.id and r.canary)::int as under_way
  from (select * from circuits c where c.next_at <= now() order by c.next_at limit $1
           for no key update skip locked) c

-- :name release
-- waiting → ready: the foremost of those that wait for a circuit. $3: whether they pass while it is half open.
with chosen as materialized (
    select r.ctid as place from runs r
     where r.state = 'waiting' and r.blocked_key = $1 and r.blocked_by = 'breaker'
     order by r.order_key
     limit $2
       for update skip locked
)
update runs r
   set state = 'ready', blocked_by = null, blocked_key = null, canary = $3
  from chosen c
 where r.ctid = c.place
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name shown
-- $1 the tenant, $2 up to how many that wait are counted.
select c.name, c.policy, c.state, c.since, c.by_hand, c.recent, c.trips, c.wave, c.sent, c.good, c.bad, c.next_at,
       c.created_at,
       (select count(*)
          from (select from runs r where r.state = 'waiting' and r.blocked_key = c.id and r.blocked_by = 'breaker'
                 limit $2) w) as waiting
  from circuits c
 where c.tenant_id = $1

-- :name get
-- :include shown
   and c.name = $3

-- :name list
-- :include shown
   and ($3::text is null or c.state = $3) and ($4::text is null or c.name > $4)
 order by c.name
 limit $5

-- :name put
-- Answers the policy that there was.
insert into circuits (tenant_id, id, name, policy) values ($1, $2, $3, $4)
    on conflict (tenant_id, id) do update set policy = excluded.policy
returning (select c.policy from circuits c where c.tenant_id = $1 and c.id = $2 limit 1)

-- :name lock_named
select c.id::text as id, c.policy, c.state, c.since, c.by_hand, c.recent, c.trips, c.wave, c.sent, c.good, c.bad,
       c.next_at, statement_timestamp() as now
  from circuits c
 where c.tenant_id = $1 and c.name = $2
   for no key update
