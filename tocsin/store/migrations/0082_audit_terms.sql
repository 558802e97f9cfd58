-- pre: how long records of the audit were to be kept when they expired, for whoever proves that they had to go.
alter table audit_archives add column expired_days int;

-- Of what has expired before: as old as it was then.
update audit_archives
   set expired_days = greatest(floor(extract(epoch from expired_at - last_at) / 86400), 0)
 where expired_at is not null;
