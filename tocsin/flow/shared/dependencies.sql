-- Edges are found by their parent or their child with the tenant as a pair, the job first, as the indexes have it: led by
-- the tenant, either index would seem to do. Jobs are found by their id or name.

-- :name named
-- The open jobs of these names and of these ids; a workflow is waited for as a whole. At worst the tenant's jobs are read
-- once, never once for each of them.
select j.id::text as id, j.name, j.tags::text as tags
  from jobs j
 where j.tenant_id = $1 and j.name = any($2::text[]) and j.state in ('active', 'paused') and j.workflow_id is null
union all
select j.id::text, j.name, j.tags::text
  from jobs j
 where j.tenant_id = $1 and j.id = any($3::uuid[]) and j.state in ('active', 'paused') and j.workflow_id is null

-- :name parents
select d.parent_id::text as parent_id, d.wants from dependencies d
 where (d.child_id, d.tenant_id) between ($2::uuid, $1::int) and ($2::uuid, $1::int)

-- :name below
-- These jobs and all that follow from them; $3 at most.
with recursive down(id) as (
    select k.id from unnest($2::uuid[]) as k(id)
    union
    select d.child_id
      from down
     cross join lateral (
            select d.child_id from dependencies d
             where (d.parent_id, d.tenant_id) between (down.id, $1::int) and (down.id, $1::int) offset 0) d
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
            select d.parent_id from dependencies d
             where (d.child_id, d.tenant_id) between (up.id, $1::int) and (up.id, $1::int) offset 0) d
)
select up.id::text as child_id, d.parent_id::text as parent_id, d.wants, d.root_id::text as root_id
  from up
 cross join lateral (
        select d.parent_id, d.wants, d.root_id from dependencies d
         where (d.child_id, d.tenant_id) between (up.id, $1::int) and (up.id, $1::int) offset 0) d
 limit $3

-- :name members
select j.id::text as id, j.name, j.schedule, coalesce(j.anchored_at, j.created_at) as anchor
  from unnest($2::uuid[]) as k(id)
 cross join lateral (
        select * from jobs j where (j.tenant_id, j.id) between ($1::int, k.id) and ($1::int, k.id) limit 1) j

-- :name awaiting
-- A run of the job that waits for runs of its parents.
select r.id::text as id from runs r
 where r.tenant_id = $1 and r.job_id = $2 and r.join_key is not null and r.pending_parents > 0
 limit 1

-- :name unlink
delete from dependencies d
 using unnest($2::uuid[]) as k(child_id)
 cross join lateral (
        select f.ctid as place from dependencies f
         where (f.child_id, f.tenant_id) between (k.child_id, $1::int) and (k.child_id, $1::int) offset 0) f
 where d.ctid = f.place

-- :name link
insert into dependencies (tenant_id, child_id, parent_id, wants, parents, root_id)
select $1, e.child_id, e.parent_id, e.wants, e.parents, e.root_id
  from unnest($2::uuid[], $3::uuid[], $4::text[], $5::int[], $6::uuid[]) as e(child_id, parent_id, wants, parents, root_id)

-- :name set_roots
update dependencies d
   set root_id = n.root_id
  from unnest($2::uuid[], $3::uuid[]) as n(child_id, root_id)
 cross join lateral (
        select f.ctid as place from dependencies f
         where (f.child_id, f.tenant_id) between (n.child_id, $1::int) and (n.child_id, $1::int) offset 0) f
 where d.ctid = f.place

-- :name set_joins
-- Whether others depend on these jobs, which are held: runs made from now on know it.
update jobs j
   set joins = not j.joins
  from unnest($2::uuid[]) as k(id)
 cross join lateral (
        select f.ctid as place, f.joins from jobs f
         where (f.tenant_id, f.id) between ($1::int, k.id) and ($1::int, k.id)
         limit 1) f
  left join lateral (
        select true as feeds from dependencies d
         where (d.parent_id, d.tenant_id) between (k.id, $1::int) and (k.id, $1::int)
         limit 1) d on true
 where f.joins <> (d.feeds is not null) and j.ctid = f.place
