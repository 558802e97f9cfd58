"""The path of the data, one transaction per step.

submit → plan → claim → report → history; beside it reap, sweep, control, dead, logs, fleet, keys, catalog,
partitions. Steps are strangers to each other; what they share (`shared/`) is the floor they stand on.
"""
