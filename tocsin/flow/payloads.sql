-- :name is_sensitive
select sensitive from jobs where tenant_id = $1 and id = $2 and state in ('active', 'paused')
