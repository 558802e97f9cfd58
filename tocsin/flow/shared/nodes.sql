-- :name present
-- The jobs that a workflow is made of, held, and first the instant.
select null::text as node, null::text as id, null::text as state, null::text as name, null::text as spec,
       statement_timestamp() as now
union all
select n.node, n.id::text, n.state, n.name, n.spec, null
  from (select * from jobs j where j.tenant_id = $1 and j.workflow_id = $2 order by j.id for no key update) n

-- :name taken
-- Those of these names that open jobs outside of the workflow have.
select coalesce(array_agg(j.name), '{}')
  from unnest($3::text[]) as k(name)
 cross join lateral (
        select * from jobs j where j.tenant_id = $1 and j.name = k.name and j.state in ('active', 'paused') limit 1) j
 where j.workflow_id is distinct from $2::uuid

-- :name given
given as materialized (
    select *
      from unnest($1::int[], $2::uuid[], $3::text[], $4::text[], $5::text[], $6::int[], $7::bool[], $8::text[], $9::int[],
                  $10::int[], $11::int[], $12::interval[], $13::jsonb[], $14::text[], $15::uuid[], $16::text[], $17::int[],
                  $18::interval[], $19::int[], $20::text[])
           as n(tenant_id, id, node, name, spec, lane_id, once, overlap, max_concurrency, max_attempts, priority,
                start_deadline, tags, zone_rules, key_id, key_template, key_max, rate_gap, rate_burst, schedule)
),
limited as (
    insert into limits (tenant_id, key, max)
    select tenant_id, id, coalesce(max_concurrency, 2147483647)
      from given
     where max_concurrency is not null or key_id is not null or rate_gap is not null
     order by tenant_id, id
        on conflict (tenant_id, key) do update set max = excluded.max
)

-- :name add
with
-- :include given
insert into jobs (tenant_id, id, workflow_id, node, name, spec, lane_id, once, overlap, max_concurrency, max_attempts,
                  priority, start_deadline, tags, zone_rules, key_id, key_template, key_max, rate_gap, rate_burst, schedule)
select tenant_id, id, $21::uuid, node, name, spec, lane_id, once, overlap, max_concurrency, max_attempts, priority,
       start_deadline, tags, zone_rules, key_id, key_template, key_max, rate_gap, rate_burst, schedule
  from given

-- :name change
-- A new version of each. One that the workflow did not have for a while is there again.
with
-- :include given
, kept as (
    insert into job_versions (tenant_id, job_id, version, spec, anchor)
    select j.tenant_id, j.id, j.version, j.spec::jsonb, coalesce(j.anchored_at, j.created_at)
      from given g
     cross join lateral (select * from jobs j where j.tenant_id = g.tenant_id and j.id = g.id limit 1) j
)
update jobs j
   set version = j.version + 1, updated_at = now(), state = case when j.state = 'paused' then 'paused' else 'active' end,
       ended_at = null, name = g.name, spec = g.spec, lane_id = g.lane_id, once = g.once, overlap = g.overlap,
       max_concurrency = g.max_concurrency, max_attempts = g.max_attempts, priority = g.priority,
       start_deadline = g.start_deadline, tags = g.tags, zone_rules = g.zone_rules, key_id = g.key_id,
       key_template = g.key_template, key_max = g.key_max, rate_gap = g.rate_gap, rate_burst = g.rate_burst,
       schedule = g.schedule
  from given g
 where j.tenant_id = g.tenant_id and j.id = g.id

-- :name retire
-- active | paused → completed: nodes that the workflow has no longer. Their runs go on, and nothing holds them.
with gone as (
    update jobs
       set state = 'completed', ended_at = now(), updated_at = now()
     where tenant_id = $1 and id = any($2::uuid[]) and state in ('active', 'paused')
    returning tenant_id, id
)
delete from holds h using gone g where h.tenant_id = g.tenant_id and h.job_id = g.id

-- :name hold
insert into holds (tenant_id, job_id)
select j.tenant_id, j.id from jobs j where j.tenant_id = $1 and j.workflow_id = $2 order by j.id
    on conflict do nothing

-- :name unhold
delete from holds h
 using jobs j
 where j.tenant_id = $1 and j.workflow_id = $2 and h.tenant_id = j.tenant_id and h.job_id = j.id

-- :name waiting_paused
-- waiting → ready: runs of nodes that were to start while the workflow was paused.
with chosen as materialized (
    select r.ctid as place
      from jobs j
     cross join lateral (
            select r.ctid from runs r
             where r.tenant_id = j.tenant_id and r.state = 'waiting' and r.blocked_key = j.id and r.blocked_by = 'paused'
             order by r.order_key
             limit 100
               for update skip locked) r
     where j.tenant_id = $1 and j.workflow_id = $2
)
update runs r
   set state = 'ready', blocked_by = null, blocked_key = null
  from chosen c
 where r.ctid = c.place
returning r.tenant_id, r.id::text as id, r.lane_id, r.state, r.ready_at, r.order_key

-- :name cancel
-- active | paused → cancelled
update jobs
   set state = 'cancelled', ended_at = now(), updated_at = now()
 where tenant_id = $1 and workflow_id = $2 and state in ('active', 'paused')

-- :name workflow_ids
-- The newest $3 workflows below $2, by the index of their nodes: skips from one to the next instead of reading all
-- jobs.
with recursive w(id) as (
    (select j.workflow_id from jobs j
      where j.tenant_id = $1 and j.workflow_id < $2::uuid
      order by j.workflow_id desc
      limit 1)
    union all
    select n.id
      from w
     cross join lateral (
            select j.workflow_id as id from jobs j
             where j.tenant_id = $1 and j.workflow_id < w.id
             order by j.workflow_id desc
             limit 1) n
)
select w.id::text as id from w limit $3
