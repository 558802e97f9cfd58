"""A round: servers and workers under load, a nemesis that kills and freezes them, and the outside checker at the end.

    python -m tests.cluster.round [--minutes N] [--seed S] [--keep]

`make test` plays a short one (`test_round.py`). The seed decides what is submitted and what is killed when; it is
printed first, so that a round can be played again (as far as the machine's own timing allows).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from .checker import Breach, check, summary
from .cluster import LEASE, Process, Server, Site, until
from .driver import Driver, Load, Made, run_load, stop_schedules, wait_until_ended
from .evidence import Evidence, Target, collect

SERVERS, WORKERS = 2, 3
P = TypeVar("P", bound=Process)
_SETTLING = 2.0  # a cancel retracts what nobody has claimed yet; before it, the healed fleet gets this long


@dataclass
class Outcome:
    """What a round did, and what the checker says of it."""

    seed: int
    evidence: Evidence
    breaches: list[Breach]
    faults: Counter[str]
    repeats: int
    counted: Counter[str] = field(default_factory=Counter)
    took: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        faults = ", ".join(f"{n} × {what}" for what, n in sorted(self.faults.items()))
        losses = sum(run.get("losses") or 0 for run in self.evidence.runs)
        took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.took.items())
        return (
            f"seed {self.seed}: {faults}; {summary(self.evidence)}; {losses} losses, "
            f"{self.counted['tocsin_superseded_total']} reports superseded, {self.repeats} requests repeated; "
            f"{took}; {len(self.breaches)} breaches"
        )


class Nemesis:
    """Ruins one thing after the other, at moments that the seed decides, and mends it again a little later."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        self._site, self._rng = site, rng
        self._ruined: set[str] = set()
        self.faults: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()

    async def rage(self, seconds: float, every: float) -> None:
        """A fault about every `every` seconds, of each kind in turn; returns when all are mended."""
        until_when = time.monotonic() + seconds
        deck: list[Callable[[], Coroutine[Any, Any, None]]] = []
        async with asyncio.TaskGroup() as mending:
            while time.monotonic() < until_when:
                await asyncio.sleep(self._rng.uniform(0.3, 1.7) * every)
                if not deck:
                    deck = [self.kill_worker, self.kill_server, self.freeze_worker]
                    self._rng.shuffle(deck)
                mending.create_task(deck.pop()())

    @contextlib.contextmanager
    def _one_of(self, processes: Sequence[P], what: str) -> Iterator[P | None]:
        """One that is whole, and stays the only one's to ruin; None if all are ruined already."""
        whole = [p for p in processes if p.name not in self._ruined]
        if not whole:
            yield None
            return
        chosen = self._rng.choice(whole)
        self._ruined.add(chosen.name)
        self.faults[what] += 1
        yield chosen
        self._ruined.discard(chosen.name)

    async def kill_worker(self) -> None:
        with self._one_of(self._site.workers, "kill -9 of a worker") as worker:
            if worker is not None:
                worker.kill()
                await asyncio.sleep(self._rng.uniform(0, 1))
                await worker.start()

    async def kill_server(self) -> None:
        with self._one_of(self._site.servers, "kill -9 of a server") as server:
            if server is not None:
                await self.count(server)
                server.kill()
                await asyncio.sleep(self._rng.uniform(0, 2))
                await server.start()

    async def freeze_worker(self) -> None:
        """Past its lease, so that it wakes as a zombie. The rest of the world goes on meanwhile."""
        with self._one_of(self._site.workers, "SIGSTOP of a worker") as worker:
            if worker is not None:
                worker.freeze()
                await asyncio.sleep(LEASE + self._rng.uniform(0.2, 1.5))
                worker.thaw()

    async def count(self, server: Server) -> None:
        """Add up a server's counters before they die with it."""
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient(timeout=5) as http:
                for line in (await http.get(f"{server.url}/metrics")).text.splitlines():
                    name, _, value = line.rpartition(" ")
                    if name.endswith("_total") and not name.startswith("#"):
                        self.counted[name] += int(float(value))


async def play(site: Site, *, seconds: float, seed: int, faults_every: float = 2.0) -> Outcome:
    """Load and faults for `seconds`; then heal, drain, and look at it from outside."""
    rng, began = random.Random(seed), time.monotonic()
    took: dict[str, float] = {}

    def lap(what: str) -> None:
        took[what] = time.monotonic() - began - sum(took.values())

    await asyncio.gather(*(site.server(f"server-{n + 1}") for n in range(SERVERS)))
    await asyncio.gather(*(site.worker(f"worker-{n + 1}", site.servers[n % SERVERS], slots=8) for n in range(WORKERS)))
    lap("start")
    nemesis = Nemesis(site, rng)
    async with Driver([s.url for s in site.servers], site.keys["key"], site.client_ledger) as driver:
        parts = await asyncio.gather(
            *(run_load(driver, load) for load in loads(site, seconds, rng)),
            nemesis.rage(max(seconds - 4, 1), faults_every),
        )
        made = Made.all(part for part in parts if part is not None)
        lap("load")
        await heal(site)
        await caught_up(driver, made)
        await stop_schedules(driver, made)
        lap("heal")
        await wait_until_ended(driver, made, 60 + seconds)
        lap("drain")
        target = Target(site.servers[0].url, site.keys["key"], driver.tag, apart=1.0, settle=0, slack=_SETTLING)
        evidence = await collect(target, [site.client_ledger], [site.job_ledger])
        breaches = check(evidence)
        lap("check")
    for server in site.servers:
        await nemesis.count(server)
    return Outcome(seed, evidence, breaches, nemesis.faults, driver.repeats, nemesis.counted, took)


def loads(site: Site, seconds: float, rng: random.Random) -> list[Load]:
    """Functions in bulk, and a few programs, which cost a process each."""
    functions = Load(site.job_ledger, seconds, batches_per_second=4, python=True, cancels_per_second=2)
    programs = Load(
        site.job_ledger, seconds, manual_jobs=2, batch=4, batches_per_second=1, once_per_second=0.5, every=("PT2S",)
    )
    functions.seed, programs.seed = rng.randrange(2**32), rng.randrange(2**32)
    return [functions, programs]


async def heal(site: Site) -> None:
    """Every process that should live, lives, and every worker is one again."""
    for process in (*site.servers, *site.workers):
        if not process.alive:
            await process.start()

    async with site.client(site.servers[0]) as api:

        async def all_live() -> bool:
            reply = await api.get("/v1/workers", params={"limit": 500})
            live = {w["name"] for w in reply.json()["items"] if w["state"] == "live"} if reply.is_success else set()
            return live >= {w.name for w in site.workers}

        await until("every worker is live", all_live, 30, every=0.2)


async def caught_up(driver: Driver, made: Made) -> None:
    """What the schedules owe by now has been claimed: from here a cancel retracts the present, not the past."""
    healed = time.time()

    async def claimed() -> bool:
        for job_id in made.every:
            runs = (await driver.get("/v1/runs", job=job_id, limit=100))["items"]
            waiting = [r for r in runs if r["state"] in ("staged", "ready", "waiting") and not r["attempt"]]
            if any(_seconds(r["scheduled_for"]) < healed for r in waiting):
                return False
        return time.time() > healed + _SETTLING

    await until("the schedules have caught up", claimed, 60, every=0.3)


def _seconds(at: str) -> float:
    from .evidence import instant

    return instant(at).timestamp()


def main() -> int:
    from tests.conftest import Cluster

    parser = argparse.ArgumentParser(description="kill real processes under load, then check every promise")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--every", type=float, default=2.0, help="seconds between faults, on average")
    parser.add_argument("--keep", action="store_true", help="keep the logs and ledgers")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tocsin-round-"))
    folder.chmod(0o711)  # PostgreSQL runs as another user where we are root
    (folder / "postgres").mkdir(mode=0o711)
    print(f"seed {given.seed}, {given.minutes:g} minutes, in {folder}", flush=True)
    postgres = Cluster(folder / "postgres")
    outcome: Outcome | None = None
    try:
        with Site(folder, postgres.template_url, postgres.keys) as site:
            outcome = asyncio.run(play(site, seconds=given.minutes * 60, seed=given.seed, faults_every=given.every))
    finally:
        postgres.server.stop(immediate=True)
        if outcome is not None and not outcome.breaches and not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for breach in outcome.breaches:
        print(breach)
    print(outcome)
    return 1 if outcome.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
