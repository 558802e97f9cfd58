-- post: the index `history_heads` begins with the same column.
drop index history_workflow;
