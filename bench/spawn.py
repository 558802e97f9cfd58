"""spawn: queued runs of a program that does nothing, through the HTTP worker protocol into history, end to end.

Each has a session, a folder and a control group of its own, pipes that are read to their end, and is gone with all that
it might have started before that is told.
"""

from __future__ import annotations

from bench import drain
from bench.drain import Drain
from bench.stand import Stand, say

BAR = 300  # a second, on 2 cores
_SLOTS = 16
_WARM_RUNS = 100


def measure(stand: Stand, *, runs: int = 3_000, repeat: int = 3) -> list[Drain]:
    """Several drains of one worker, one after the other."""
    jobs = {"default": stand.api.create_job({"kind": "process", "command": ["true"]})}
    say("warming up …")
    drain.drain_once(stand, jobs, _WARM_RUNS, _SLOTS, workers=1)
    found = []
    for number in range(1, repeat + 1):
        found.append(drain.drain_once(stand, jobs, runs, _SLOTS, workers=1))
        say(f"spawn {number}/{repeat}: {drain.describe(found[-1])}")
    return found
