-- Nobody looks for cursors by this key any more (0010).
alter table triggers drop constraint triggers_pkey;
