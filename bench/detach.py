"""detach: what others notice while a day of history is archived under a report that takes long.

Reports and ends of runs are asked for at a steady pace: first alone, then of a server that writes and proves the day
meanwhile, then while its partition waits to be detached, for a reader holds on to it all the time.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from bench import archive
from bench.stand import Api, Stand, await_until, say

ROWS = 1_000_000  # of the day
KINDS = ("reports", "ends")
BAR = 2.0  # times as long as alone, at the 99th percentile
_CALLS, _ENDS = 250, 2  # of each kind alone, and while it waits, which it does for 15 s; ends in a call
_EVERY = 0.05  # seconds from one call of a kind to the next
_REPORTED, _SLOTS = 500, 15_000  # runs that the reports are about; runs to end, which last for six minutes
_BATCH = 4_000
_DETACHES = "select exists (select from pg_stat_activity where wait_event = 'virtualxid' and query like '%detach%')"


@dataclass(frozen=True)
class Times:
    """Milliseconds of calls."""

    reports: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def p99(self, what: str) -> float:
        return statistics.quantiles(getattr(self, what), n=100)[-1]


@dataclass(frozen=True)
class Detached:
    """Calls alone, beside a day that is written and proved, and beside its partition that waits to go; and how many
    cores others used meanwhile."""

    alone: Times
    written: Times
    waiting: Times
    foreign_cores: float

    def ratio(self, when: str, what: str) -> float:
        """How many times as long as alone the slowest of a hundred took."""
        return float(getattr(self, when).p99(what) / self.alone.p99(what))

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        phases = {"alone": self.alone, "written": self.written, "waiting": self.waiting}
        found = {f"{when}_{what}_p99_ms": one.p99(what) for when, one in phases.items() for what in KINDS}
        return found | {"foreign_cores": self.foreign_cores}


def measure(stand: Stand) -> Detached:
    """Time calls alone, then beside a day that goes."""
    day = archive.FIRST_DAY - timedelta(days=1)
    asyncio.run(archive.fill(stand, archive.make_jobs(stand), day, ROWS))
    worker = _Worker(stand)
    say("timing calls alone …")
    began, cpu = time.perf_counter(), stand.cpu()
    before = worker.time_calls(_enough)
    reader = _Reader(stand)
    try:
        # A server's archivist takes its first turn at once.
        worker.turn_to(stand.add_server(hot_days=2))
        say("timing calls while the day is written …")
        written = worker.time_calls(lambda _: reader.is_waited_for())
        say("timing calls while its partition waits …")
        waiting = worker.time_calls(lambda times: _enough(times) or not reader.is_waited_for())
    finally:
        reader.close()
    # Once more, because others may load the machine more or less by now.
    after = worker.time_calls(_enough)
    alone = Times(before.reports + after.reports, before.ends + after.ends)
    foreign = stand.cpu().since(cpu).foreign() / (time.perf_counter() - began)
    return Detached(alone, written, waiting, foreign)


class _Reader:
    """Somebody with a long report: a transaction that has read history, and stays."""

    def __init__(self, stand: Stand) -> None:
        self._loop = asyncio.new_event_loop()
        self._connection = self._run(stand.connect())
        self._observer = self._run(stand.connect())
        self._run(self._connection.execute("begin isolation level repeatable read"))
        self._run(self._connection.fetchval("select count(*) from history"))

    def _run(self, awaited: Any) -> Any:
        return self._loop.run_until_complete(awaited)

    def is_waited_for(self) -> bool:
        return bool(self._run(self._observer.fetchval(_DETACHES)))

    def close(self) -> None:
        self._run(self._connection.close())
        self._run(self._observer.close())
        self._loop.close()


class _Worker:
    """A worker with many runs to end, and a client with a report to read: always of the same runs."""

    def __init__(self, stand: Stand) -> None:
        self._key = stand.keys["worker_key"]
        self.turn_to(stand.api)
        job = self._api.create_job({"kind": "process", "command": ["true"]})
        self._id = self._send("register", {"name": "ends", "slots": _SLOTS, "targets": ["process"]})["worker_id"]
        self._runs: list[dict[str, Any]] = []
        self._last = 0
        self._claim(job, _REPORTED)
        while self._runs:
            self._end_some()
        upto = asyncio.run(stand.query("select now() + interval '1 millisecond' as at"))[0]["at"]
        self._report = f"/v1/reports/runs?to={upto:%Y-%m-%dT%H:%M:%S.%fZ}"
        self._claim(job, _SLOTS)

    def turn_to(self, api: Api) -> None:
        """Talk to this server from now on."""
        self._api = api.another()
        self._worker_api = http.client.HTTPConnection("127.0.0.1", api.port, timeout=60)

    def _claim(self, job: str, count: int) -> None:
        for start in range(0, count, _BATCH):
            self._api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * min(_BATCH, count - start)})

        def claimed() -> bool:
            asked = {"slots": count - len(self._runs), "wait": 1, "last_claim": self._last}
            answer = self._send(f"{self._id}/claim", asked)
            self._last = answer["claim_id"]
            self._runs += [{name: run[name] for name in ("run_id", "attempt", "fence")} for run in answer["runs"]]
            return len(self._runs) == count

        await_until(claimed, "all runs are claimed")

    def time_calls(self, over: Callable[[Times], bool]) -> Times:
        """Until it is over."""
        times, stop = Times(), threading.Event()
        with ThreadPoolExecutor(2) as pool:
            asking = [
                pool.submit(_ask, lambda: self._api.call("GET", self._report), times.reports, stop),
                pool.submit(_ask, self._end_some, times.ends, stop),
            ]
            try:
                await_until(lambda: any(one.done() for one in asking) or over(times), "it is over")
            finally:
                stop.set()
        for one in asking:
            one.result()
        return times

    def _end_some(self) -> None:
        ended, self._runs = self._runs[:_ENDS], self._runs[_ENDS:]
        finished = [run | {"outcome": "succeeded"} for run in ended]
        answer = self._send(f"{self._id}/report", {"last_claim": self._last, "finished": finished})
        if len(answer["accepted"]) < _ENDS:
            raise RuntimeError(f"{len(self._runs)} runs are left, and of {len(ended)} not all could be ended")

    def _send(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        self._worker_api.request("POST", f"/v1/worker/{path}", json.dumps(body).encode(), headers)
        reply = self._worker_api.getresponse()
        content = reply.read()
        if not 200 <= reply.status < 300:
            raise RuntimeError(f"{path}: {reply.status} {content[:500].decode(errors='replace')}")
        return json.loads(content)  # type: ignore[no-any-return]


def _enough(times: Times) -> bool:
    return min(len(times.reports), len(times.ends)) >= _CALLS


def _ask(call: Callable[[], Any], times: list[float], stop: threading.Event) -> None:
    """Call at a steady pace, or as fast as calls are answered if that is slower."""
    rest = 0.0
    while not stop.wait(rest):
        begun = time.perf_counter()
        call()
        took = time.perf_counter() - begun
        times.append(took * 1000)
        rest = max(0.0, _EVERY - took)
