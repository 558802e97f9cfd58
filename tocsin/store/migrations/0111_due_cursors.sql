-- post: cursors that are due are found by an index without those that wait or are behind (0110).
drop index triggers_due;
