-- post: `history_heads` begins with the same column.
drop index history_workflow;
