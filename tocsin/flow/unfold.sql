-- :name folded
-- Nodes whose runs must be created from a list in object storage. `map` is null if the node does not wait any more, for
-- example because it was cancelled. In order from $2 on: nodes whose list cannot be fetched must not hide the others.
select u.tenant_id, u.run_id::text as id, case when r.state = 'waiting' and r.map <> '{}' then r.map end as map
  from unmapped u
  left join lateral (
        select r.state, r.map from runs r
         where (r.tenant_id, r.id) between (u.tenant_id, u.run_id) and (u.tenant_id, u.run_id)
         limit 1) r on true
 where u.run_id > $2
 order by u.run_id
 limit $1

-- :name take
-- One of them, which is unfolded in this transaction; whoever comes second finds nothing.
delete from unmapped where tenant_id = $1 and run_id = $2 returning true
