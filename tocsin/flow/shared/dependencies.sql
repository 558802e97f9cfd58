-- :name named
-- The open jobs that these are the names, or else the ids, of. A workflow is waited for as a whole.
--   $1 tenant  $2 names  $3 ids, where the name could be one
select w.n::int as n, j.id::text as id, j.name, j.tags::text as tags
  from unnest($2::text[], $3::uuid[]) with ordinality as w(name, id, n)
 cross join lateral (
        (select j.id, j.name, j.tags from jobs j
          where j.tenant_id = $1 and j.id = w.id and j.state in ('active', 'paused') and j.workflow_id is null
          limit 1)
        union all
        (select j.id, j.name, j.tags from jobs j
          where j.tenant_id = $1 and j.name = w.name and j.state in ('active', 'paused') and j.workflow_id is null
          limit 1)
        limit 1) j

-- :name parents
select d.parent_id::text as parent_id, d.wants from dependencies d where d.tenant_id = $1 and d.child_id = $2

-- :name see_all
-- A key may be kept to some of the jobs; what a change means for the others must be known all the same.
select set_config('tocsin.scope', '', true)

-- :name below
-- These jobs and all that follow from them; $3 at most.
with recursive down(id) as (
    select k.id from unnest($2::uuid[]) as k(id)
    union
    select d.child_id
      from down
     cross join lateral (
            select d.child_id from dependencies d where d.tenant_id = $1 and d.parent_id = down.id offset 0) d
)
select id::text as id from down limit $3

-- :name above
-- What these jobs, and those that they follow from, depend on; $3 at most.
with recursive up(id) as (
    select k.id from unnest($2::uuid[]) as k(id)
    union
    select d.parent_id
      from up
     cross join lateral (
            select d.parent_id from dependencies d where d.tenant_id = $1 and d.child_id = up.id offset 0) d
)
select up.id::text as child_id, d.parent_id::text as parent_id, d.wants, d.root_id::text as root_id
  from up
 cross join lateral (
        select d.parent_id, d.wants, d.root_id from dependencies d
         where d.tenant_id = $1 and d.child_id = up.id offset 0) d
 limit $3

-- :name members
select j.id::text as id, j.name, j.schedule, coalesce(j.anchored_at, j.created_at) as anchor
  from unnest($2::uuid[]) as k(id)
 cross join lateral (select * from jobs j where j.tenant_id = $1 and j.id = k.id limit 1) j

-- :name awaiting
-- A run of the job that waits for runs of its parents.
select r.id::text as id from runs r
 where r.tenant_id = $1 and r.job_id = $2 and r.join_key is not null and r.pending_parents > 0
 limit 1

-- :name unlink
delete from dependencies d where d.tenant_id = $1 and d.child_id = any($2::uuid[]) returning d.parent_id::text as parent_id

-- :name link
insert into dependencies (tenant_id, child_id, parent_id, wants, parents, root_id)
select $1, e.child_id, e.parent_id, e.wants, e.parents, e.root_id
  from unnest($2::uuid[], $3::uuid[], $4::text[], $5::int[], $6::uuid[]) as e(child_id, parent_id, wants, parents, root_id)

-- :name set_roots
update dependencies d
   set root_id = n.root_id
  from unnest($2::uuid[], $3::uuid[]) as n(child_id, root_id)
 where d.tenant_id = $1 and d.child_id = n.child_id

-- :name set_joins
-- Whether others depend on these jobs, which are held: runs made from now on know it.
update jobs j
   set joins = not j.joins
  from unnest($2::uuid[]) as k(id)
 cross join lateral (
        select f.ctid as place, f.joins from jobs f where f.tenant_id = $1 and f.id = k.id limit 1) f
 where f.joins <> exists (select from dependencies d where d.tenant_id = $1 and d.parent_id = k.id)
   and j.ctid = f.place
