-- :name list
-- Dead letters of a range of ids, newest first. Sections `only_…` are the conditions of the filters.
select d.run_id::text as id, d.job_id::text as job_id, j.name as job_name, d.job_version, d.died_at, d.error_class,
       d.error, d.args, d.tags::text as tags
  from dead_letters d
  left join lateral (select * from jobs j where j.tenant_id = d.tenant_id and j.id = d.job_id limit 1) j on true
 where d.tenant_id = $tenant and d.run_id >= $low::uuid and d.run_id < $high::uuid
   $ONLY
 order by d.run_id desc
 limit $most

-- :name floor
-- The id behind that many letters; no row if there are fewer.
select d.run_id::text
  from dead_letters d
 where d.tenant_id = $tenant and d.run_id >= $low::uuid and d.run_id < $high::uuid
   $ONLY
 order by d.run_id desc
offset $window
 limit 1

-- :name only_job
-- By its index: history.sql explains why the condition is repeated.
and d.job_id = $job::uuid
and (d.tenant_id, d.job_id, d.run_id) >= ($tenant, $job::uuid, $low::uuid)
and (d.tenant_id, d.job_id, d.run_id) < ($tenant, $job::uuid, $high::uuid)
-- :name only_error_class
and d.error_class = $error_class
and (d.tenant_id, d.error_class, d.run_id) >= ($tenant, $error_class, $low::uuid)
and (d.tenant_id, d.error_class, d.run_id) < ($tenant, $error_class, $high::uuid)

-- :name take
-- The letters leave in the transaction that redrives or discards them.
delete from dead_letters d
 where d.tenant_id = $1 and d.run_id = any($2::uuid[])
returning d.run_id::text as id, d.job_id::text as job_id, d.priority, d.args, d.logical_at

-- :name take_matching
-- The oldest that match. What another call is taking is its own.
with chosen as materialized (
    select d.ctid as place
      from dead_letters d
     where d.tenant_id = $1 and ($2::uuid is null or d.job_id = $2) and ($3::text is null or d.error_class = $3)
       and ($4::jsonb is null or d.tags @> $4)
       and exists (select from jobs j where j.tenant_id = d.tenant_id and j.id = d.job_id
                                        and ($6 or j.state <> 'cancelled'))
     order by d.run_id
     limit $5
       for update skip locked
)
delete from dead_letters d
 using chosen c
 where d.ctid = c.place
returning d.run_id::text as id, d.job_id::text as job_id, d.priority, d.args, d.logical_at

-- :name remaining
select count(*)
  from (select from dead_letters d
         where d.tenant_id = $1 and ($2::uuid is null or d.job_id = $2) and ($3::text is null or d.error_class = $3)
           and ($4::jsonb is null or d.tags @> $4)
         limit 100000) d

-- :name hold_jobs
-- These jobs and, of those that are part of one, their workflows: whoever cancels a workflow takes it first, too.
select j.id::text as id, j.state, j.key_template, j.node, j.workflow_id::text as workflow_id,
       exists (select from jobs n where n.tenant_id = $1 and n.workflow_id = j.id) as has_nodes
  from jobs j
 where j.tenant_id = $1
   and j.id = any($2::uuid[] || array(select n.workflow_id from jobs n
                                       where n.tenant_id = $1 and n.id = any($2::uuid[]) and n.workflow_id is not null))
 order by j.id
   for share

-- :name go_on
-- One after the other, whoever goes on with the same workflow run: no second head of one that has a head. Taken in
-- order, after the jobs. They share so many locks that a call of any size finds room in PostgreSQL's table of them.
select pg_advisory_xact_lock(hashtext('tocsin.heads'), w.lock)
  from (select distinct hashtext(w.id) & 511 as lock from unnest($1::text[]) as w(id) order by 1) w

-- :name under_way
-- Which of these workflow runs, of which a head has ended, have another that lives. They come with their workflows.
select w.id
  from unnest($2::uuid[], $3::text[]) as w(job_id, id)
 where exists (select from runs r where r.tenant_id = $1 and r.workflow_run_id = w.id::uuid and r.job_id = w.job_id)

-- :name heads
-- The workflow runs that these are of, and the instants that they stand for.
select h.run_id::text as id, coalesce(h.workflow_run_id, h.run_id)::text as workflow_run_id,
       coalesce(h.logical_at, h.scheduled_for) as logical_at
  from history h
 where h.tenant_id = $1 and h.run_id = any($2::uuid[]) and h.final

-- :name last_head
-- The last head of a workflow run, and its workflow: the one that lives, if there is one. `whole`: nothing of it is
-- archived, for nothing of it has a lower id than its first head.
select o.*, j.id::text as id, j.key_template, j.spec,
       o.run_id = $3::text or exists (select from history h where h.tenant_id = $1 and h.run_id = $3 and h.final) as whole
  from ((select true as live, r.id::text as run_id, r.job_id, r.state, r.priority, r.args,
                coalesce(r.logical_at, r.scheduled_for) as logical_at
           from runs r
          where r.tenant_id = $1 and r.job_id = $2 and r.id = $3)
        union all
        (select true, r.id::text, r.job_id, r.state, r.priority, r.args, coalesce(r.logical_at, r.scheduled_for)
           from runs r
          where r.tenant_id = $1 and r.job_id = $2 and r.workflow_run_id = $3
          order by r.id
          limit 1)
        union all
        (select false, h.run_id::text, h.job_id, h.state, h.priority, h.args, coalesce(h.logical_at, h.scheduled_for)
           from history h
          where h.tenant_id = $1 and h.job_id = $2 and h.workflow_run_id = $3 and h.final
            -- A second head, which did nothing.
            and h.state <> 'skipped'
          order by h.run_id desc
          limit 1)
        union all
        (select false, h.run_id::text, h.job_id, h.state, h.priority, h.args, coalesce(h.logical_at, h.scheduled_for)
           from history h
          where h.tenant_id = $1 and h.job_id = $2 and h.run_id = $3 and h.final
            and not (h.state = 'skipped' and h.workflow_run_id is not null))
        limit 1) o
 cross join lateral (select * from jobs j where j.tenant_id = $1 and j.id = o.job_id limit 1) j

-- :name origin
select h.job_id::text as job_id, h.priority, h.args, h.trigger, h.scheduled_for, h.logical_at,
       h.workflow_run_id::text as workflow_run_id, h.origin_run_id::text as origin_run_id,
       h.origin_run_id is not null and h.trigger = 'dependency' as is_element
  from history h
 where h.tenant_id = $1 and h.run_id = $2 and h.final
