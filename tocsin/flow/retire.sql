-- :name lock
-- The progress of the pass. No row while another server reads, or within $1 seconds after the start of a finished pass.
select part, began_at, at_tenant, at_id::text as at_id
  from lane_pass
 where part <> 'done' or began_at < now() - $1 * interval '1 second'
   for update skip locked

-- :name begin
update lane_pass set began_at = now(), part = 'jobs', at_tenant = 0, at_id = '00000000-0000-0000-0000-000000000000'

-- :name page_of_jobs
-- The lanes of the next $3 jobs after ($1, $2), the number of jobs, and the last of them.
with page as materialized (
    select j.tenant_id, j.id, j.lane_id, row_number() over (order by j.tenant_id, j.id) as n
      from jobs j
     where (j.tenant_id, j.id) > ($1, $2)
     order by j.tenant_id, j.id
     limit $3)
select count(*)::int as rows, array_agg(distinct p.lane_id) as lanes,
       (select l.tenant_id from page l order by l.n desc limit 1) as tenant_id,
       (select l.id::text from page l order by l.n desc limit 1) as id
  from page p

-- :name page_of_runs
-- The same for live runs: a run that waits or runs may use a lane that its job has left.
with page as materialized (
    select r.tenant_id, r.id, r.lane_id, row_number() over (order by r.tenant_id, r.id) as n
      from runs r
     where (r.tenant_id, r.id) > ($1, $2)
     order by r.tenant_id, r.id
     limit $3)
select count(*)::int as rows, array_agg(distinct p.lane_id) as lanes,
       (select l.tenant_id from page l order by l.n desc limit 1) as tenant_id,
       (select l.id::text from page l order by l.n desc limit 1) as id
  from page p

-- :name mark
-- Mark these lanes as used, including retired ones that a server used before it knew that they are retired. Each lane
-- is written once per pass.
with used as (
    update lanes l set retired_at = null, seen_at = now() where l.id = any($1::int[]) and l.retired_at is not null
)
update lanes l set seen_at = now() where l.id = any($1::int[]) and l.retired_at is null and l.seen_at < $2

-- :name go_on
update lane_pass set at_tenant = $1, at_id = $2::text::uuid

-- :name next_part
update lane_pass set part = $1, at_tenant = 0, at_id = '00000000-0000-0000-0000-000000000000'

-- :name remove
-- Remove lanes that were retired at least $2 seconds before the pass began and that the pass has not met, with their
-- vouching workers. Does nothing while servers run that do not check for retired lanes.
with gone as (
    delete from lanes l
     where l.retired_at < $1::timestamptz - $2 * interval '1 second' and l.seen_at < $1::timestamptz
       and not exists (select from servers where newest_migration < '0120' and seen_at > now() - interval '1 minute')
    returning l.id
)
delete from lane_vouchers v where v.lane_id = any (array(select g.id from gone g))

-- :name retire
-- Retire lanes that the pass has not met, except the lane of workflow runs: servers know it by its id.
update lanes l set retired_at = now() where l.retired_at is null and l.seen_at < $1 and l.pool <> 'workflows'
