-- :name erasure
-- How far it is, if the tenant is being erased.
       e.state as erasing, e.asked_at, e.actor, e.rows, e.objects
  from tenants t
  left join erasures e on e.tenant_id = t.id

-- :name find
select t.*,
-- :include erasure
 where t.slug = $1

-- :name lock
select t.*,
-- :include erasure
 where t.slug = $1
   for no key update of t

-- :name add
insert into tenants (slug, weight, max_jobs, max_queued, max_running, submit_rate, log_bytes_per_day)
values ($1, $2, $3, $4, $5, $6, $7)
    on conflict do nothing
returning *

-- :name change
update tenants
   set weight = $2, max_jobs = $3, max_queued = $4, max_running = $5, submit_rate = $6, log_bytes_per_day = $7,
       http_allow = $8, runs_days = $9, legal_hold = $10, hot_days = $11, logs_days = $12, audit_days = $13
 where slug = $1

-- :name suspend
update tenants set suspended_at = now() where slug = $1

-- :name resume
update tenants set suspended_at = null, suspended_from = suspended_at, suspended_until = now() where slug = $1

-- :name http_allow
select t.id, t.http_allow
  from unnest($1::int[]) as w(id)
 cross join lateral (select * from tenants t where t.id = w.id and t.http_allow <> '{}' limit 1) t

-- :name list
select t.*,
-- :include erasure
 where $1::int is null or t.id < $1
 order by t.id desc
 limit $2
