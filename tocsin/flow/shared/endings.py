"""Endings: end runs that no worker holds, and release the runs that waited for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tocsin.flow.shared.joins import settle
from tocsin.flow.shared.transitions import Hint, Key, end_unheld, gates, hints, lock_jobs, lock_limits, release
from tocsin.store.db import Connection


class Ending(NamedTuple):
    """A run that must end: its job and key; whether its end completes a one-time job; whether other runs may wait for
    it, under a limit or behind it."""

    run: Key
    job_id: str
    key_id: str | None = None
    once: bool = True
    gated: bool = True


async def end_runs(connection: Connection, endings: Sequence[Ending], state: str, reason: str) -> list[Hint]:
    """staged | ready | waiting → `state`. Lock jobs, limits and runs in the lock order, and decide about all runs that
    wait for these. A run that a worker holds by now stays unchanged."""
    jobs = {ending.run.id: Key(ending.run.tenant_id, ending.job_id) for ending in endings}
    await lock_jobs(connection, [jobs[ending.run.id] for ending in endings if ending.once])
    gated = {ending.run.id: gates(jobs[ending.run.id], ending.key_id) for ending in endings if ending.gated}
    await lock_limits(connection, [key for keys in gated.values() for key in keys])
    ended = await end_unheld(connection, sorted((ending.run for ending in endings), key=_by_id), state, reason)
    freed = [key for row in ended for key in gated.get(row["id"], ())]
    return hints(await release(connection, freed)) + (await settle(connection, ended)).hints


def _by_id(run: Key) -> str:
    return run.id
