-- :name fetch
select k.tenant_id, k.job_id::text as job_id, k.version, j.name, coalesce(v.spec::text, j.spec) as spec
  from unnest($1::int[], $2::uuid[], $3::int[]) as k(tenant_id, job_id, version)
 cross join lateral (select * from jobs j where j.tenant_id = k.tenant_id and j.id = k.job_id limit 1) j
  left join job_versions v on v.tenant_id = k.tenant_id and v.job_id = k.job_id and v.version = k.version
