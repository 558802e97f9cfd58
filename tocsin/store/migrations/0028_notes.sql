-- pre: what a run says of itself while it runs: how far it is, and a state that its next attempt finds (JSON).
-- With the run, and not beside it: the fence that guards them is the row's, the claim that hands the state over reads the
-- row, and both are gone with it.
alter table runs
    add column progress float8,
    add column checkpoint text;
