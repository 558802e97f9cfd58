"""backfill: what live work notices of a past that is filled beside it.

Jobs of 20 tenants fall due all the time, and runs are asked for at once; how late both start is compared between
stretches of time, by turns: alone, beside backfills of a year of days of one job, one after the other, and beside those
of a workflow of five.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from bench.stand import TENANTS, Api, Stand, await_until, say

BAR = 1.5  # times as late at the 99th percentile
KINDS = ("job", "workflow")
LIVE = {"schedule": "scheduled runs", "api": "runs asked for"}  # by what triggers them
_LIVE_PER_TENANT = 10  # jobs that fall due each second
_ASKED_PER_SECOND = 60
_SECONDS = 10.0  # of a stretch
_SLOTS = 100
_AT_ONCE = 8  # runs of a backfill
_GRAPH: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["a"], "d": ["a"], "e": ["b", "c", "d"]}
_NOOP = {"kind": "python", "function": "bench.noop"}
_YEAR = {"from": "2025-01-01T00:00:00Z", "to": "2026-01-01T00:00:00Z", "max_concurrency": _AT_ONCE}
_LAGS = """
select trigger, extract(epoch from started_at - ready_at)::float8 * 1000 as ms
  from history
 where job_id = any($1::uuid[]) and ready_at >= $2 and ready_at < $3 and started_at is not null
"""


@dataclass(frozen=True)
class Lag:
    """How late live runs of one kind started, in milliseconds."""

    runs: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Stretch:
    """How late live runs started, by what triggers them, beside which backfills, and how many runs of those ended."""

    beside: str | None
    lags: dict[str, Lag]
    filled: int
    foreign_cores: float


@dataclass(frozen=True)
class Backfilled:
    """All stretches, by turns alone and beside."""

    stretches: list[Stretch]

    def p99(self, live: str, beside: str | None) -> float:
        """The median of the stretches beside such backfills, or alone."""
        return statistics.median(one.lags[live].p99 for one in self.stretches if one.beside == beside)

    def ratio(self, live: str, kind: str) -> float:
        """How many times as late the latest of a hundred live runs starts."""
        return self.p99(live, kind) / max(self.p99(live, None), 0.1)

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        ratios = {f"{live}_{kind}_ratio": self.ratio(live, kind) for live in LIVE for kind in KINDS}
        return ratios | {"stretches": [asdict(one) for one in self.stretches]}


def measure(stand: Stand, *, repeat: int = 3) -> Backfilled:
    """Stretches by turns, on one stand."""
    live = _live_jobs(stand.api)
    past = {"job": stand.api.create_job(_NOOP, "fill-00"), "workflow": _workflow(stand.api)}
    stand.start_workers(1, _SLOTS)
    try:
        await_until(lambda: _lags(stand, live, datetime(2026, 1, 1, tzinfo=UTC))["schedule"], "live runs start")
        _stretch(stand, live, past, "workflow")  # to warm up
        turns = [beside for _ in range(repeat) for kind in KINDS for beside in (None, kind)]
        found = [_stretch(stand, live, past, beside) for beside in turns]
    finally:
        stand.stop_workers()
        api = stand.api.another()  # nobody spoke on the first one for long
        for name, job in live.items():
            api.post(f"/v1/jobs/{job}/cancel", {}, name.partition("/")[0])
    return Backfilled(found)


def describe(one: Stretch) -> str:
    """One line."""
    beside = f"beside {one.filled:,} {one.beside} runs of backfills" if one.beside else "alone"
    lags = [f"{lag.runs:,} {LIVE[live]} p50 {lag.p50:.1f} ms, p99 {lag.p99:.1f} ms" for live, lag in one.lags.items()]
    return f"{beside}: {'; '.join(lags)}; others used {one.foreign_cores:.2f} cores"


def _live_jobs(api: Api) -> dict[str, str]:
    """Jobs that fall due every second, by tenant and number."""
    jobs = {}
    for number in range(TENANTS):
        slug = f"fill-{number:02d}"
        api.post("/v1/tenants", {"slug": slug})
        for n in range(_LIVE_PER_TENANT):
            jobs[f"{slug}/{n}"] = api.create_job(_NOOP, slug, schedule={"every": "PT1S"}, overlap="allow")
    return jobs


def _workflow(api: Api) -> str:
    jobs = {name: {"target": _NOOP, "depends_on": wanted} for name, wanted in _GRAPH.items()}
    made = api.post("/v1/workflows", {"name": "past", "schedule": {"manual": True}, "jobs": jobs}, "fill-00")
    return str(made["id"])


def _stretch(stand: Stand, live: dict[str, str], past: dict[str, str], beside: str | None) -> Stretch:
    stand.await_quiet()
    from_, begun, before = _now(stand), time.perf_counter(), stand.cpu()
    with _backfills(stand.api.another(), past[beside]) if beside else _nothing() as filled:
        _ask(stand.api.another(), live)
        to = _now(stand)
    foreign = stand.cpu().since(before).foreign() / (time.perf_counter() - begun)
    lags = {trigger: _lag(found) for trigger, found in _lags(stand, live, from_, to).items()}
    one = Stretch(beside, lags, sum(filled), foreign)
    if beside and not one.filled:
        raise RuntimeError("no run of a backfill ended: that says nothing")
    say(describe(one))
    return one


def _ask(api: Api, live: dict[str, str]) -> None:
    """For runs of the live jobs, in turn, at an even pace, until the stretch is over."""
    begun = time.monotonic()
    for number, (name, job) in zip(range(int(_ASKED_PER_SECOND * _SECONDS)), itertools.cycle(live.items())):
        time.sleep(max(0.0, begun + number / _ASKED_PER_SECOND - time.monotonic()))
        api.post(f"/v1/jobs/{job}/runs", {}, name.partition("/")[0])


def _lag(found: list[float]) -> Lag:
    cuts = statistics.quantiles(found, n=100)
    return Lag(len(found), cuts[49], cuts[98])


@contextmanager
def _nothing() -> Iterator[list[int]]:
    yield []


@contextmanager
def _backfills(api: Api, job: str) -> Iterator[list[int]]:
    """A year is filled again and again, until it is left; how much of each."""
    filled: list[int] = []
    over = threading.Event()

    def fill() -> None:
        while not over.is_set():
            made = api.post(f"/v1/jobs/{job}/backfill", _YEAR | {"schedule": {"cron": "0 0 * * *"}}, "fill-00")
            path = f"/v1/backfills/{made['id']}"
            while (found := api.call("GET", path, tenant="fill-00"))["state"] == "running" and not over.wait(0.2):
                pass
            if found["state"] == "running":
                found = api.post(f"{path}/cancel", {}, "fill-00")
            if found["failed"]:
                raise RuntimeError(f"{found['failed']} runs of a backfill failed")
            filled.append(found["succeeded"])

    filler = threading.Thread(target=fill)
    filler.start()
    try:
        yield filled
    finally:
        over.set()
        filler.join()


def _now(stand: Stand) -> datetime:
    return asyncio.run(stand.query("select now() as now"))[0]["now"]  # type: ignore[no-any-return]


def _lags(stand: Stand, live: dict[str, str], from_: datetime, to: datetime | None = None) -> dict[str, list[float]]:
    """How late the runs that fell due between two instants started, by what triggered them."""
    rows = asyncio.run(stand.query(_LAGS, list(live.values()), from_, to or _now(stand)))
    return {trigger: [row["ms"] for row in rows if row["trigger"] == trigger] for trigger in LIVE}
