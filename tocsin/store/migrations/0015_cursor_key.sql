-- post: nobody looks for cursors by this key any more (0010), but servers from before that do.
alter table triggers drop constraint triggers_pkey;
