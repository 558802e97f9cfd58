"""Whatever can go wrong under a site, one fault after the other, at moments that a seed decides, each mended later.

Processes are killed, frozen past the lease and restarted in turn; the ways between client, servers, workers and
database are held, delayed, stranded, cut and made to repeat themselves; the database is stopped and started, and fails
over to a standby; a node's clock is stepped. Each fault is noted with its times, for the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from .clockshim import ClockShim
from .cluster import LEASE, Server, Site, Worker, until
from .database import OwnDatabase
from .ledger import recent_lags
from .proxy import Link

P = TypeVar("P", Server, Worker)
RECOVERY = LEASE + 5.0  # what a killed worker had in hand must run again by then
_NO_QUEUE = 0.5  # seconds
_PATIENCE = 120.0  # by then a process that was ended lives again, on however busy a machine


@dataclass
class Fault:
    """One thing that was done, from when to when it lasted (Unix time)."""

    kind: str
    subject: str
    began: float
    ended: float = 0.0
    note: dict[str, Any] = field(default_factory=dict)


@dataclass
class Net:
    """Every way of a site that goes through a proxy."""

    clients: list[Link]  # from the driver, one a server
    workers: dict[str, Link]
    databases: dict[str, Link]  # from each server

    @property
    def links(self) -> list[Link]:
        return [*self.clients, *self.workers.values(), *self.databases.values()]

    def heal(self) -> None:
        """Every way is free again."""
        for link in self.links:
            link.heal()

    async def close(self) -> None:
        for link in self.links:
            await link.close()


class Nemesis:
    """Ruins what is whole, and leaves enough whole that work can go on: one server, and two workers of five."""

    def __init__(
        self,
        site: Site,
        net: Net,
        database: OwnDatabase,
        clocks: dict[str, ClockShim],
        rng: random.Random,
    ) -> None:
        self._site, self._net, self._database, self._clocks, self._rng = site, net, database, clocks, rng
        self._ruined: set[str] = set()
        self.faults: list[Fault] = []
        self.counted: Counter[str] = Counter()

    async def rage(self, seconds: float, every: float) -> None:
        """A fault about every `every` seconds, each kind once, in any order and over each other; when all are mended
        and what they held up is done, a worker is killed alone, for its recovery to be measured; and again."""
        until_when = time.monotonic() + seconds
        while time.monotonic() < until_when:
            async with asyncio.TaskGroup() as mending:
                deck = self.kinds()
                for ruin in self._rng.sample(deck, len(deck)):
                    mending.create_task(ruin())
                    pause = self._rng.uniform(0.3, 1.7) * every
                    await asyncio.sleep(min(pause, max(until_when - time.monotonic(), 0)))
                    if time.monotonic() >= until_when:
                        break
            if time.monotonic() + RECOVERY < until_when:
                alone = await self._caught_up(until_when - RECOVERY)
                await asyncio.gather(self.kill_worker(alone=alone), asyncio.sleep(RECOVERY))

    async def _caught_up(self, by: float) -> bool:
        """Wait until what starts was made just now: no queue is left of former faults. False if that takes too long."""
        while time.monotonic() < by:
            lags = recent_lags(self._site.job_ledger)
            if lags and statistics.median(lags) < _NO_QUEUE:
                return True
            await asyncio.sleep(0.5)
        return False

    def kinds(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """One of each kind."""
        ways: list[Callable[[], Coroutine[Any, Any, None]]] = [
            *(self.kill_worker, self.freeze_worker, self.restart_worker),
            *(self.kill_server, self.freeze_server, self.restart_server),
            *(self.worker_way, self.client_way, self.database_way),
            *(lambda: self.restart_database(immediate=True), lambda: self.restart_database(immediate=False)),
        ]
        ways += [self.fail_over] if self._database.has_standby else []
        return ways + ([self.step_clock] if self._clocks else [])

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    async def kill_worker(self, *, alone: bool = False) -> None:
        async with self._one_of(self._site.workers, "kill -9 of a worker") as (worker, fault):
            fault.note |= {"worker_id": worker_id(worker), "alone": alone}
            worker.kill()
            await asyncio.sleep(self._rng.uniform(0, 1))
            await self._bring_up(worker)

    async def kill_server(self) -> None:
        async with self._one_of(self._site.servers, "kill -9 of a server") as (server, _):
            await self.count(server)
            server.kill()
            await asyncio.sleep(self._rng.uniform(0, 2))
            await self._bring_up(server)

    async def freeze_worker(self) -> None:
        """Past its lease, so that it wakes as a zombie. The rest of the world goes on meanwhile."""
        await self._freeze(self._site.workers, "SIGSTOP of a worker past its lease")

    async def freeze_server(self) -> None:
        """With whatever transactions and locks it has, until the leases of its workers are over."""
        await self._freeze(self._site.servers, "SIGSTOP of a server past the lease")

    async def _freeze(self, processes: Sequence[P], kind: str) -> None:
        async with self._one_of(processes, kind) as (process, _):
            process.freeze()
            try:
                await asyncio.sleep(LEASE + self._rng.uniform(0.2, 1.5))
            finally:
                process.thaw()

    async def restart_worker(self) -> None:
        await self._restart(self._site.workers, "SIGTERM and restart of a worker")

    async def restart_server(self) -> None:
        await self._restart(self._site.servers, "SIGTERM and restart of a server")

    async def _restart(self, processes: Sequence[P], kind: str) -> None:
        async with self._one_of(processes, kind) as (process, fault):
            if isinstance(process, Server):
                await self.count(process)
            process.terminate()
            fault.note["exit_code"] = await process.ended(40)
            await self._bring_up(process)

    async def step_clock(self) -> None:
        """An hour or years, forward or back, and back again."""
        name = self._rng.choice(sorted(self._clocks))
        if f"clock of {name}" in self._ruined:
            return
        with self._ruin(f"clock of {name}", "clock step of a node") as fault:
            fault.note["step"] = step = self._rng.choice((3600.0, -3600.0, 315_576_000.0, -90.0, 90.0))
            self._clocks[name].step(step)
            await asyncio.sleep(self._rng.uniform(2, 6))
            self._clocks[name].step(-step)

    # ── the ways between them ────────────────────────────────────────────────────────────────────────────────────

    async def worker_way(self) -> None:
        kind = self._way(http=True)
        async with self._one_of(self._site.workers, f"worker–server: {kind}") as (worker, _):
            await self._spoil(self._net.workers[worker.name], kind)

    async def database_way(self) -> None:
        kind = self._way(http=False)
        async with self._one_of(self._site.servers, f"server–database: {kind}") as (server, _):
            await self._spoil(self._net.databases[server.name], kind)

    async def client_way(self) -> None:
        """The server itself stays whole: its workers and its database do not notice."""
        kind, number = self._way(http=True), self._rng.randrange(len(self._net.clients))
        subject = f"client to {self._site.servers[number].name}"
        if subject not in self._ruined:
            with self._ruin(subject, f"client–server: {kind}"):
                await self._spoil(self._net.clients[number], kind)

    def _way(self, *, http: bool) -> str:
        kinds = ["partition", "requests lost", "replies lost", "half-open", "delay", "reply cut"]
        return self._rng.choice([*kinds, "duplicates", "duplicates"] if http else kinds)

    async def _spoil(self, link: Link, kind: str) -> None:
        seconds = self._rng.uniform(0.5, 1.5 * LEASE)
        try:
            match kind:
                case "partition" | "requests lost" | "replies lost":
                    link.hold(up=kind != "replies lost", down=kind != "requests lost")
                case "half-open":
                    link.strand()
                case "delay":
                    link.delay = self._rng.uniform(0.05, 0.5)
                case "reply cut":
                    for _ in range(self._rng.randint(1, 4)):
                        link.cut_next()
                case "duplicates":
                    link.duplicates = self._rng.uniform(0.2, 1.0)
            await asyncio.sleep(seconds)
        finally:
            link.heal()

    # ── the database ─────────────────────────────────────────────────────────────────────────────────────────────

    async def restart_database(self, *, immediate: bool) -> None:
        if "database" not in self._ruined:
            how = "immediate" if immediate else "fast"
            with self._ruin("database", f"database restart ({how})") as fault:
                fault.note["ready"] = await self._database.restart(immediate=immediate)

    async def fail_over(self) -> None:
        """The primary dies, its synchronous standby takes its place, and gets a standby in turn."""
        if "database" not in self._ruined:
            with self._ruin("database", "database fail-over to its standby") as fault:
                fault.note["ready"] = await self._database.fail_over()
                for link in self._net.databases.values():
                    link.upstreams = [self._database.address]
                await self._database.replace_standby()

    # ── books ────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def _one_of(self, processes: Sequence[P], kind: str) -> AsyncIterator[tuple[P, Fault]]:
        """One that is whole, and stays only this fault's to ruin. Waits while too few are."""
        least = len(processes) // 2  # of three one, of five two

        async def enough() -> list[P]:
            whole = [p for p in processes if p.name not in self._ruined]
            return whole if len(whole) > least else []

        chosen = self._rng.choice(await until(f"enough is whole for {kind}", enough, _PATIENCE))
        with self._ruin(chosen.name, kind) as fault:
            yield chosen, fault

    @contextlib.contextmanager
    def _ruin(self, name: str, kind: str) -> Iterator[Fault]:
        fault = Fault(kind, name, time.time())
        self._ruined.add(name)
        self.faults.append(fault)
        try:
            yield fault
        finally:
            fault.ended = time.time()
            self._ruined.discard(name)

    async def _bring_up(self, process: Server | Worker) -> None:
        """Start it until it lives: it may refuse while the database is down."""
        give_up_at = time.monotonic() + _PATIENCE
        while True:
            try:
                await process.start()
                return
            except AssertionError:
                if process.alive:  # a worker whose way is spoilt registers when it is free
                    return
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(0.3)

    async def count(self, server: Server) -> None:
        """Add up a server's counters before they die with it."""
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(timeout=5) as http:
                for line in (await http.get(f"{server.url}/metrics")).text.splitlines():
                    name, _, value = line.rpartition(" ")
                    if name.endswith("_total") and not name.startswith("#"):
                        self.counted[name] += int(float(value))


def worker_id(worker: Worker) -> str | None:
    """What the worker's present process was last registered as."""
    for line in reversed(worker.log.read_text(errors="replace").splitlines()):
        if '"registered"' in line:
            with contextlib.suppress(ValueError):
                return str(json.loads(line)["worker"])
    return None
