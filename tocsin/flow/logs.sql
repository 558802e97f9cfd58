-- :name held
-- Whose lines these are, and how many are there already. A stale fence finds nothing.
select i.n, r.tenant_id,
       coalesce((select c.first_line + c.lines from log_chunks c
                  where c.tenant_id = r.tenant_id and c.run_id = r.id and c.attempt = r.attempt
                  order by c.first_line desc limit 1), 0) as lines
  from unnest($2::uuid[], $3::int[], $4::bigint[]) with ordinality as i(run_id, attempt, fence, n)
  join runs r on r.worker_id = $1 and r.id = i.run_id and r.state in ('running', 'stopping')
             and r.attempt = i.attempt and r.fence = i.fence

-- :name add
insert into log_chunks (tenant_id, run_id, attempt, first_line, lines, object, position, bytes)
select * from unnest($1::int[], $2::uuid[], $3::int[], $4::bigint[], $5::int[], $6::text[], $7::bigint[], $8::int[])
    on conflict do nothing

-- :name chunks
select first_line, lines, object, position, bytes
  from log_chunks
 where tenant_id = $1 and run_id = $2 and attempt = $3 and first_line + lines > $4
 order by first_line
 limit $5

-- :name last_attempt
select max(attempt) from log_chunks where tenant_id = $1 and run_id = $2
