"""Pure rules, no I/O. `now` and randomness are arguments.

One vocabulary, in SQL, API, CLI and code alike:

job         a promise: what to run, when, where, and what to do when it fails
schedule    when a job owes an occurrence
occurrence  one instant a schedule owes
run         the keeping of one occurrence, or of a call by hand; has a state
attempt     one try of a run on one worker; has an outcome
lane        an interned (pool, kind, function, resources, labels): who may take a run
lease       a worker's promise to report; on the database clock
fence       a number that rises with each claim of a run; a stale one changes nothing
"""
