-- pre: the heads of a workflow run are found among the runs of its nodes, of which a mapped node may have thousands.
create index history_heads on history (workflow_run_id, job_id, run_id) where workflow_run_id is not null;
