"""storm: many one-time jobs, due at one instant, call something that is down, under one circuit; then it is back.

What is counted: how often the dead thing was called after the circuit had opened, and how many probes were allowed;
whether the circuit opened again once the thing was back; and how long another tenant's runs took to start, before,
during and after.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.stand import Api, Stand, await_until, marks, say

_COOLDOWN, _LONGEST_COOLDOWN = 2.0, 8.0
_POLICY = {"cooldown": f"{_COOLDOWN:.0f}s", "max_cooldown": f"{_LONGEST_COOLDOWN:.0f}s"}
_RETRY = {"max_attempts": 20, "delay": "PT1S", "max_delay": "PT10S"}
_SLOTS = 200
_JOBS_PER_CALL = 1_000
_SUBMITS_PER_SECOND = 1_000  # what storing them may cost, counted generously
_LEAD_SECONDS = 5.0  # between the last submit and the instant, at least
_CALM_SECONDS = 10.0
_GAP_SECONDS = 0.02
_WAIT_SECONDS = 300.0
_UNDER_WAY = 1.0  # seconds for calls that were on their way to a worker when the circuit opened


@dataclass(frozen=True)
class Lag:
    """Milliseconds from a submit of the other tenant to its start."""

    runs: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Storm:
    """`before_open`: calls until the circuit had opened, with those under way; `while_open`: calls after that, in
    `seconds`, of which the cool-downs allow `allowed`; `trips` once the thing was back, and how long all took."""

    jobs: int
    before_open: int
    while_open: int
    allowed: int
    seconds: float
    trips: int
    drain_seconds: float
    calm: Lag
    during: Lag
    after: Lag

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)


def describe(one: Storm) -> Iterator[tuple[str, str, str]]:
    """Lines of the table."""
    yield (
        "calls while it was open",
        f"{one.while_open}",
        f"in {one.seconds:.0f} s, {one.allowed} allowed by the cool-downs; {one.before_open} of {one.jobs:,} before",
    )
    yield "trips after its return", f"{one.trips}", f"all {one.jobs:,} had succeeded after {one.drain_seconds:.1f} s"
    for what, lag in (("down", one.during), ("back", one.after)):
        yield (
            f"another's p99 while it is {what}",
            f"{lag.p99 / one.calm.p99:.2f}×",
            f"{lag.p99:.1f} ms, alone {one.calm.p99:.1f} ms (p50 {lag.p50:.1f} and {one.calm.p50:.1f} ms)",
        )


def measure(stand: Stand, *, jobs: int, seconds: float) -> Storm:
    """One storm."""
    for tenant in ("storm", "calm"):
        stand.api.post("/v1/tenants", {"slug": tenant})
    stand.api.call("PUT", "/v1/circuits/dead", _POLICY, "storm")
    stand.start_workers(1, _SLOTS)
    try:
        with marks() as calls, _down() as down, marks() as starts:
            other = _Other(stand.api.another(), starts)
            other.watch(2.0)  # warms up
            stand.await_quiet()
            calm = other.watch(_CALM_SECONDS)
            return _blow(stand, other, calm, calls, down, jobs, seconds)
    finally:
        stand.stop_workers()


def _blow(stand: Stand, other: _Other, calm: Lag, calls: Path, down: Path, jobs: int, seconds: float) -> Storm:
    target = {"kind": "python", "function": "bench.call", "kwargs": {"path": str(calls), "down": str(down)}}
    due = time.time() + jobs / _SUBMITS_PER_SECOND + _LEAD_SECONDS
    at = {"at": datetime.fromtimestamp(due, UTC).isoformat()}
    job = {"schedule": at, "target": target, "circuit": "dead", "retry": _RETRY}
    for first in range(0, jobs, _JOBS_PER_CALL):
        count = min(_JOBS_PER_CALL, jobs - first)
        stand.api.post("/v1/jobs/batch", {"jobs": [job] * count}, "storm")
    if (spare := due - time.time()) < 1:
        raise RuntimeError(f"storing {jobs} took so long that {spare:.1f} s were left")
    time.sleep(spare - 0.5)
    with other.meanwhile() as during:
        opened = _when_open(stand.api)
        time.sleep(seconds)
        until = time.time()
    came = [float(line) for line in calls.read_text().splitlines()]
    down.unlink()
    trips, begun = _trips(stand.api), time.perf_counter()
    with other.meanwhile() as after:
        _drained(stand.api, jobs)
    took = time.perf_counter() - begun
    late = [at for at in came if opened + _UNDER_WAY < at <= until]
    found = Storm(
        jobs,
        *(len(came) - len(late), len(late), _allowed(until - opened), until - opened),
        *(_trips(stand.api) - trips, took),
        *(calm, during[0], after[0]),
    )
    for what, figure, more in describe(found):
        say(f"{what}: {figure} {more}")
    return found


def _when_open(api: Api) -> float:
    """When it opened first: later openings have a later `since`, so this looks soon and often."""

    def opened() -> str | None:
        shown = api.call("GET", "/v1/circuits/dead", tenant="storm")
        return None if shown["state"] == "closed" else str(shown["since"])

    return datetime.fromisoformat(await_until(opened, "the circuit opens", _WAIT_SECONDS)).timestamp()


def _allowed(seconds: float) -> int:
    """How many probes the cool-downs allow in so many seconds."""
    cooldown, at, probes = _COOLDOWN, _COOLDOWN, 0
    while at <= seconds:
        probes, cooldown = probes + 1, min(_LONGEST_COOLDOWN, 2 * cooldown)
        at += cooldown
    return probes


def _trips(api: Api) -> int:
    return api.counter('tocsin_circuit_transitions_total{state="open"}')


def _drained(api: Api, jobs: int) -> None:
    """Until every run has ended, as `succeeded`: a dead one is an error."""
    active = "/v1/jobs?state=active&limit=1"
    await_until(
        lambda: not api.call("GET", active, tenant="storm")["items"], f"all {jobs} end", _WAIT_SECONDS, every=0.25
    )
    if api.call("GET", "/v1/dead-letters?limit=1", tenant="storm")["items"]:
        raise RuntimeError("some of the runs died")


@contextmanager
def _down() -> Iterator[Path]:
    """A file that says that the thing is down."""
    descriptor, name = tempfile.mkstemp(prefix="tocsin-down-")
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


class _Other:
    """Another tenant, who submits a run now and then and looks when it starts."""

    def __init__(self, api: Api, path: Path) -> None:
        self._api, self._path = api, path
        target = {"kind": "python", "function": "bench.mark", "kwargs": {"path": str(path)}}
        self._job = api.create_job(target, "calm")
        self._seen = 0

    def watch(self, seconds: float) -> Lag:
        """For so long."""
        stop = threading.Event()
        timer = threading.Timer(seconds, stop.set)
        timer.start()
        return self._watch(stop)

    @contextmanager
    def meanwhile(self) -> Iterator[list[Lag]]:
        """For as long as the body takes; the list has the figure afterwards."""
        stop, found = threading.Event(), list[Lag]()
        thread = threading.Thread(target=lambda: found.append(self._watch(stop)))
        thread.start()
        try:
            yield found
        finally:
            stop.set()
            thread.join()

    def _watch(self, stop: threading.Event) -> Lag:
        sent = 0
        while not stop.wait(_GAP_SECONDS * (0.7 + 0.6 * random.random())) or sent < 2:
            self._api.post(f"/v1/jobs/{self._job}/runs", {"args": {"sent": time.time()}}, "calm")
            sent += 1
        lags = self._read(sent)
        cuts = statistics.quantiles(lags, n=100, method="inclusive")
        return Lag(sent, cuts[49], cuts[98])

    def _read(self, sent: int) -> list[float]:
        def started() -> list[str]:
            lines = self._path.read_text().splitlines()[self._seen :]
            return lines if len(lines) >= sent else []

        lines = await_until(started, f"{sent} runs start", _WAIT_SECONDS)
        self._seen += sent
        pairs = [line.split() for line in lines]
        return [(float(started) - float(at)) * 1e3 for started, at in pairs]
