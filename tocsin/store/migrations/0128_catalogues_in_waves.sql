-- pre: retention finds what is due in catalogues of files without reading all of them.
create index archives_kept on archives (tenant_id, day, object) where expired_at is null;
create index archives_expired on archives (tenant_id, day, object) where expired_at is not null;
create index audit_archives_kept on audit_archives (tenant_id, first_seq) where expired_at is null;
create index audit_archives_expired on audit_archives (tenant_id, first_seq) where expired_at is not null;
create index audit_archives_unfinished on audit_archives (tenant_id, first_seq) where gone_at is null;
