-- post: runs_parked has taken its place.
drop index runs_waiting;
