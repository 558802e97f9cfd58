# How long a test waits for what must come. Only a failure takes so long, so it is no measure of anything; a long poll
# lasts longer, and its mere end is therefore never taken for an answer.
PATIENCE = 50.0
