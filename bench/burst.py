"""burst: many no-op runs due at one instant. How long after it each of them starts, and that none starts before it.

The job itself looks at the clock, as its first act. It reads the clock of this machine, and so does the PostgreSQL of
the stand, which runs beside it: before each burst the two are compared (`_clock_offset`), so what the job saw is the
database's time, to within the error that is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.stand import TENANTS, Stand, marks, say

_PEERS = Path(__file__).with_name("peers.py")
_PEERS_DATABASE = "peers"
_SLOTS = 2_000
_WAIT_SECONDS = 60.0
_LEAD_SECONDS = 3.0  # between the last submit and the instant, at least
_SUBMITS_PER_SECOND = 1_000  # what storing a burst may cost, counted generously
_JOBS_PER_CALL = 1_000
_RUNS_PER_CALL = 5_000
_CLOCK_READINGS = 200


@dataclass(frozen=True)
class Burst:
    """Milliseconds from the instant to the starts; `first` below zero would be a run that started early."""

    what: str
    runs: int
    slots: int | None
    first: float
    p50: float
    p95: float
    p99: float
    worst: float
    clock_error: float | None
    foreign_cores: float | None

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)


def describe(one: Burst) -> str:
    """One line."""
    clock = "" if one.clock_error is None else f"; the database's clock to ±{one.clock_error:.2f} ms"
    noise = "" if one.foreign_cores is None else f", others used {one.foreign_cores:.2f} cores"
    return (
        f"first {one.first:.1f} ms, p50 {one.p50:.1f} ms, p95 {one.p95:.1f} ms, worst {one.worst:.1f} ms "
        f"({one.runs:,} runs, {f'{one.slots:,} slots' if one.slots else 'its own pool'}{clock}{noise})"
    )


def measure(stand: Stand, *, repeat: int, peer_python: str) -> list[Burst]:
    """Each kind of burst, the median of `repeat` by p99; and the peers' same bursts."""
    stand.api  # noqa: B018 (starts the server, which the worker needs)
    _make_tenants(stand)
    stand.start_workers(1, _SLOTS)
    try:
        _burst(stand, "warm-up", 200, _runs_of_one_job)
        found = [
            _median([_burst(stand, what, runs, submit) for _ in range(repeat)])
            for what, runs, submit in (
                ("one-time jobs", 1_000, _one_time_jobs),
                ("recurring jobs", 1_000, _recurring_jobs),
                ("runs of one job", 1_000, _runs_of_one_job),
                ("runs of 20 tenants", 10_000, _runs_of_many_tenants),
            )
        ]
    finally:
        stand.stop_workers()
    return found + _peers(stand, repeat, peer_python)


def _median(bursts: list[Burst]) -> Burst:
    middle = statistics.median_low(one.p99 for one in bursts)
    return next(one for one in bursts if one.p99 == middle)


def _burst(stand: Stand, what: str, runs: int, submit: Callable[[Stand, dict[str, Any], int, datetime], None]) -> Burst:
    with marks() as path:
        offset, error = asyncio.run(_clock_offset(stand))
        due = float(int(time.time() + runs / _SUBMITS_PER_SECOND + _LEAD_SECONDS) + 1)
        target = {"kind": "python", "function": "bench.start", "kwargs": {"path": str(path)}}
        submit(stand, target, runs, datetime.fromtimestamp(due, UTC))
        if (spare := due - time.time()) < 1:
            raise RuntimeError(f"storing {runs} took so long that {spare:.1f} s were left")
        time.sleep(spare - 0.5)
        begun, before = time.perf_counter(), stand.cpu()
        starts = _read(path, runs)
        foreign = stand.cpu().since(before).foreign() / (time.perf_counter() - begun)
    one = _result(what, _SLOTS, [(start + offset - due) * 1e3 for start in starts], error * 1e3, foreign)
    say(f"{what}: p99 {one.p99:.1f} ms; {describe(one)}")
    return one


def _result(what: str, slots: int | None, lags: list[float], error: float | None, foreign: float | None) -> Burst:
    cuts = statistics.quantiles(lags, n=100, method="inclusive")
    return Burst(what, len(lags), slots, min(lags), cuts[49], cuts[94], cuts[98], max(lags), error, foreign)


async def _clock_offset(stand: Stand) -> tuple[float, float]:
    """The database's clock less ours, in seconds, and how wrong that may be: zero if the two cannot be told apart."""
    low, high = float("-inf"), float("inf")
    connection = await stand.connect()
    try:
        for _ in range(_CLOCK_READINGS):
            before = time.time()
            there = (await connection.fetchval("select clock_timestamp()")).timestamp()
            low, high = max(low, there - time.time()), min(high, there - before)
    finally:
        await connection.close()
    middle, error = (low + high) / 2, (high - low) / 2
    return (0.0 if low <= 0.0 <= high else middle), error


# ── what falls due ───────────────────────────────────────────────────────────────────────────────────────────────


def _make_tenants(stand: Stand) -> None:
    for number in range(TENANTS):
        stand.api.post("/v1/tenants", {"slug": f"burst-{number:02d}"})


def _one_time_jobs(stand: Stand, target: dict[str, Any], count: int, due: datetime) -> None:
    _jobs(stand, {"schedule": {"at": due.isoformat()}, "target": target}, count)


def _recurring_jobs(stand: Stand, target: dict[str, Any], count: int, due: datetime) -> None:
    _jobs(stand, {"schedule": {"every": "P1D", "starting_at": due.isoformat()}, "target": target}, count)


def _jobs(stand: Stand, job: dict[str, Any], count: int) -> None:
    for _ in range(count // _JOBS_PER_CALL):
        stand.api.post("/v1/jobs/batch", {"jobs": [job] * _JOBS_PER_CALL})


def _runs_of_one_job(stand: Stand, target: dict[str, Any], count: int, due: datetime) -> None:
    _runs(stand, target, count, due, "default")


def _runs_of_many_tenants(stand: Stand, target: dict[str, Any], count: int, due: datetime) -> None:
    for number in range(TENANTS):
        _runs(stand, target, count // TENANTS, due, f"burst-{number:02d}")


def _runs(stand: Stand, target: dict[str, Any], count: int, due: datetime, tenant: str) -> None:
    job = stand.api.create_job(target, tenant)
    for first in range(0, count, _RUNS_PER_CALL):
        runs = [{"at": due.isoformat()}] * min(_RUNS_PER_CALL, count - first)
        stand.api.post(f"/v1/jobs/{job}/runs/batch", {"runs": runs}, tenant)


# ── what has started ─────────────────────────────────────────────────────────────────────────────────────────────


def _read(path: Path, goal: int) -> list[float]:
    """When each run started; looks seldom, because whoever measures uses a core, too."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while (count := path.stat().st_size and len(path.read_text().splitlines())) < goal:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{count} of {goal} runs had started after {_WAIT_SECONDS:.0f} s")
        time.sleep(0.5)
    if count > goal:
        raise RuntimeError(f"{goal} runs made {count} starts")
    return [float(line) for line in path.read_text().splitlines()]


# ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _peers(stand: Stand, repeat: int, python: str) -> list[Burst]:
    """The same bursts by others, where they are installed. They are in no lock of ours."""
    asyncio.run(stand.query(f"create database {_PEERS_DATABASE}", database="postgres"))
    found = []
    for name in ("apscheduler", "pgqueuer"):
        for runs in (1_000, 10_000) if _has(python, name) else ():
            bursts = [_peer(stand, python, name, runs) for _ in range(repeat)]
            if kept := [one for one in bursts if one is not None]:
                found.append(_median(kept))
    return found


def _has(python: str, name: str) -> bool:
    if subprocess.run([python, "-c", f"import {name}"], capture_output=True).returncode == 0:
        return True
    say(f"{name}: left out, since {python} does not have it; name one that does with --peer-python")
    return False


def _peer(stand: Stand, python: str, name: str, runs: int) -> Burst | None:
    stand.await_quiet()
    url = stand.superuser_url(_PEERS_DATABASE)
    done = subprocess.run(
        [python, str(_PEERS), name, str(runs)], env=os.environ | {"PG_URL": url}, capture_output=True, text=True
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        say(f"{name}: left out ({reason})")
        return None
    one = _result(name, None, json.loads(done.stdout), None, None)
    say(f"{name}: p99 {one.p99:.1f} ms; {describe(one)}")
    return one
