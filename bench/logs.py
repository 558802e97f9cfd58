"""logs: how fast one server process takes lines in, how small they are stored, how fast a rare word is found among
them, and how little of them is in PostgreSQL; before and after they are compacted. And how far behind those are who
follow a log."""

from __future__ import annotations

import asyncio
import http.client
import random
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec

from bench.stand import Api, Stand, await_until, say
from tocsin.flow import compact
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore

# The bars: MB/s, share of raw, seconds, share of raw, seconds behind (p95).
INGEST, STORED, RARE, GROWTH, TAIL = 20.0, 0.35, 1.0, 0.01, 1.0
_WORKERS = 4
_RUNS = 8  # of each worker, all of which write
_SHIPMENT = 1_000_000
_ROUND = 48_000_000
_RARE = "zyzzyva"
_TABLES = "select pg_total_relation_size('tocsin.log_chunks') + pg_total_relation_size('tocsin.log_segments')"
_LYING = """select count(*), coalesce(sum(stored_bytes + bytes), 0)::bigint
  from tocsin.log_segments where replaced_at is null"""
_TAILERS, _TAILED = 50, 40  # followers of one log, and lines that they see
_PENDING = "select count(*) from tocsin.log_segments where added_at > now()"


@dataclass(frozen=True)
class Lying:
    """How lines lie: segments, bytes in object storage (with filters) and in PostgreSQL; seconds for a rare word."""

    segments: int
    stored: int
    tables: int
    rare: float


@dataclass(frozen=True)
class Logs:
    """What was measured with so many bytes of text."""

    raw: int
    per_second: float  # bytes of text, over the time in which they were shipped
    server_seconds: float
    postgres_seconds: float
    loose: Lying
    compacted: Lying
    compacted_per_second: float
    tail_lags: list[float]  # seconds, of each line at each follower

    @property
    def tail_p95(self) -> float:
        return statistics.quantiles(self.tail_lags, n=20)[-1]

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        bars = {"ingest": INGEST, "stored": STORED, "rare": RARE, "growth": GROWTH, "tail": TAIL}
        return asdict(self) | {"tail_lags": None, "tail_p95": self.tail_p95, "bars": bars}


def measure(stand: Stand, megabytes: int) -> Logs:
    """Ship, search, compact, search again."""
    lags = _tail(stand)
    empty = _tables(stand)
    raw, seconds, server, postgres = _ingest(stand, megabytes * 1_000_000)
    loose = _look(stand, empty)
    took = asyncio.run(_compact(stand))
    await_until(lambda: not asyncio.run(stand.query(_PENDING))[0][0], "the new segments are in use")
    return Logs(raw, raw / seconds, server, postgres, loose, _look(stand, empty), raw / took, lags)


# ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Worker:
    """A worker whose runs do nothing but write."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self._key, self._port = stand.keys["worker_key"], stand.settings.port
        self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._rng = random.Random(seed)
        self._words = [f"{self._rng.choice('abcdefghij')}{i}_part" for i in range(4000)]
        body = {"name": f"bench-{seed}", "slots": _RUNS, "targets": ["process"]}
        self.id = self._send("register", body)["worker_id"]
        runs = self._send(f"{self.id}/claim", {"slots": _RUNS, "wait": 30, "last_claim": 0})["runs"]
        self.runs = [{name: run[name] for name in ("run_id", "attempt", "fence")} | {"offset": 0} for run in runs]
        self.rare = False
        self.written = 0

    def shipments(self, size: int) -> list[bytes]:
        """Bodies with so much text, made before the clock runs."""
        bodies = []
        while size > 0:
            chunks = [self._chunk(run, _SHIPMENT // len(self.runs)) for run in self.runs]
            bodies.append(msgspec.msgpack.encode({"chunks": chunks}))
            text = sum(len(line[3]) + 1 for chunk in chunks for line in chunk["lines"])
            self.written += text
            size -= text
        return bodies

    def _chunk(self, run: dict[str, Any], size: int) -> dict[str, Any]:
        lines = []
        pick, number, now = self._rng.choice, self._rng.getrandbits, time.time()
        while size > 0:
            word = f" {_RARE}" if self.rare else ""
            self.rare = False
            text = (
                f"{now:.3f} INFO svc.{pick(self._words)} request={number(48):012x} user={number(14)} "
                f"{pick(self._words)} {pick(self._words)} took {number(10)} ms, {pick(self._words)} is done{word}"
            )
            lines.append((now, "stdout", "info", text))
            size -= len(text) + 1
        chunk = run | {"lines": lines}
        run["offset"] += len(lines)
        return chunk

    def say(self, text: str) -> None:
        """One line of the first run."""
        run = self.runs[0]
        chunk = run | {"lines": [(time.time(), "stdout", "info", text)]}
        run["offset"] += 1
        self.ship([msgspec.msgpack.encode({"chunks": [chunk]})])

    def ship(self, bodies: list[bytes]) -> None:
        """One after the other, as a worker does."""
        for body in bodies:
            self._post(f"{self.id}/logs", body, "application/msgpack")

    def beat(self) -> None:
        """A heartbeat."""
        self._send(f"{self.id}/report", {})

    def another(self) -> _Worker:
        """The same over a connection of its own, for another thread."""
        twin = object.__new__(_Worker)
        twin.__dict__ |= self.__dict__
        twin._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        return twin

    def _send(self, path: str, body: object) -> Any:
        return msgspec.json.decode(self._post(path, msgspec.json.encode(body), "application/json"))

    def _post(self, path: str, body: bytes, kind: str) -> bytes:
        headers = {"authorization": f"Bearer {self._key}", "content-type": kind}
        self._connection.request("POST", f"/v1/worker/{path}", body, headers)
        reply = self._connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status} {content[:300].decode(errors='replace')}")
        return content


@contextmanager
def _alive(workers: list[_Worker]) -> Iterator[None]:
    """Heartbeats go on meanwhile."""
    over = threading.Event()
    twins = [worker.another() for worker in workers]

    def beat() -> None:
        while not over.wait(2.0):
            for twin in twins:
                twin.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ingest(stand: Stand, total: int) -> tuple[int, float, float, float]:
    """Bytes of text, seconds in which they were shipped, and seconds of the server's and PostgreSQL's processors."""
    job = stand.api.create_job({"kind": "process", "command": ["true"]}, overlap="allow")
    stand.api.post(f"/v1/jobs/{job}/runs/batch", {"runs": [{}] * (_WORKERS * _RUNS)})
    workers = [_Worker(stand, seed) for seed in range(_WORKERS)]
    raw, seconds, server, postgres = 0, 0.0, 0.0, 0.0
    with _alive(workers), ThreadPoolExecutor(_WORKERS) as threads:
        while raw < total:
            size = min(_ROUND, total - raw)
            workers[0].rare = raw == 0
            bodies = [worker.shipments(size // _WORKERS) for worker in workers]
            raw = sum(worker.written for worker in workers)
            say(f"   {raw // 1_000_000:,} MB")
            before, start = stand.cpu(), time.perf_counter()
            list(threads.map(_Worker.ship, workers, bodies))
            seconds += time.perf_counter() - start
            used = stand.cpu().since(before).trees
            server, postgres = server + used["server"], postgres + used["postgres"]
    return raw, seconds, server, postgres


# ── live ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tail(stand: Stand) -> list[float]:
    """How far behind its writing each line comes to each follower, less what the worker waits before it ships."""
    job = stand.api.create_job({"kind": "process", "command": ["true"]})
    stand.api.post(f"/v1/jobs/{job}/runs", {})
    worker = _Worker(stand, _WORKERS)
    with _alive([worker]):
        return asyncio.run(_followed(stand, worker))


async def _followed(stand: Stand, worker: _Worker) -> list[float]:
    lags: list[float] = []
    url = f"http://127.0.0.1:{stand.settings.port}/v1/runs/{worker.runs[0]['run_id']}/logs/stream"
    headers = {"authorization": f"Bearer {stand.keys['key']}"}

    async def follow(session: aiohttp.ClientSession, begun: asyncio.Semaphore) -> None:
        async with session.get(url, headers=headers) as reply:
            begun.release()
            seen = 0
            async for line in reply.content:
                if line.startswith(b"data: "):
                    lags.append(time.monotonic() - float(msgspec.json.decode(line[6:])["text"]))
                    seen += 1
                    if seen == _TAILED:
                        return

    begun = asyncio.Semaphore(0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session, asyncio.TaskGroup() as tasks:
        for _ in range(_TAILERS):
            tasks.create_task(follow(session, begun))
        for _ in range(_TAILERS):
            await begun.acquire()
        for _ in range(_TAILED):
            await asyncio.to_thread(worker.say, str(time.monotonic()))
            await asyncio.sleep(0.1)
    return lags


# ── out ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _look(stand: Stand, empty: int) -> Lying:
    segments, stored = asyncio.run(stand.query(_LYING))[0]
    times = []
    for _ in range(4):  # the first warms up
        start = time.perf_counter()
        found = _search(stand.api, _RARE)
        times.append(time.perf_counter() - start)
        if len(found) != 1:
            raise RuntimeError(f"the rare word was found {len(found)} times")
    return Lying(segments, stored, _tables(stand) - empty, statistics.median(times[1:]))


def _search(api: Api, word: str) -> list[Any]:
    """All pages."""
    found: list[Any] = []
    cursor: dict[str, str] = {}
    while True:
        page = api.call("GET", f"/v1/logs/search?{urlencode({'q': word} | cursor)}")
        found += page["items"]
        if page["next_cursor"] is None:
            return found
        cursor = {"cursor": page["next_cursor"]}


async def _compact(stand: Stand) -> float:
    """Seconds that it took, by itself: the server's own compactor waits until segments have settled."""
    compact.SETTLED = 0.0
    db = Database(stand.settings.database_url, size=2)
    await db.open()
    objects = ObjectStore("", stand.home / "objects")
    try:
        await stand.query("update tocsin.log_segments set added_at = added_at - interval '2 hours' where not compacted")
        start = time.perf_counter()
        for tenant_id in await compact.tenants(db):
            while await compact.compact(db, objects, tenant_id):
                pass
        took = time.perf_counter() - start
        await stand.query("update tocsin.log_garbage set due_at = now() - interval '1 second'")
        while await compact.clean(db, objects):
            pass
        await stand.query("vacuum full tocsin.log_chunks, tocsin.log_segments")
        return took
    finally:
        await db.close()


def _tables(stand: Stand) -> int:
    return int(asyncio.run(stand.query(_TABLES))[0][0])
