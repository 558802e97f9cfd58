"""A round: servers and workers under load, a nemesis that ruins what it can, and the outside checker at the end.

    python -m tests.cluster.round [--minutes N] [--seed S] [--keep]        (make chaos MINUTES=30 SEED=7)

leaves `chaos-report.json` and `chaos-report.html`. Exit 0: every promise held. Exit 1: breaches. Exit 2: no breach, but
the machine did less than it must (`report.py` has the bars). `make test` plays a short one (`test_round.py`). The seed
decides what is submitted and what is ruined when; it is printed first, so that a round can be played again (as far as
the machine's own timing allows).
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
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from . import report
from .checker import Breach, check, summary
from .clockshim import ClockShim
from .cluster import LEASE, ROOT, Server, Site, Worker, until
from .database import OwnDatabase
from .driver import Driver, Load, Made, run_load, stop_schedules, wait_until_ended
from .evidence import Evidence, Target, collect, instant
from .nemesis import Fault, Nemesis, Net
from .progress import Progress
from .proxy import Link

_SETTLING = 2.0  # a cancel retracts what nobody has claimed yet; before it, the healed fleet gets this long
_CALM = 5.0  # the last seconds of the load, without new faults


def heavy(seconds: float, rate: float, job_ledger: Path, rng: random.Random) -> list[Load]:
    """Functions in bulk; a limit that is really met; some that last; and programs, which cost a process each."""
    bulk = Load(
        job_ledger,
        seconds,
        batch=50,
        batches_per_second=(rate - 20) / 50,
        once_per_second=2,
        cancels_per_second=1,
        workflows_per_second=2,
        crons=("* * * * *",),
        max_concurrency=None,
        longest=0.05,
        failing=0.02,
        writing=0.01,
        python=True,
    )
    limited = Load(job_ledger, seconds, manual_jobs=1, batch=4, batches_per_second=1, every=(), python=True)
    lasting = Load(job_ledger, seconds, manual_jobs=1, batch=10, batches_per_second=1, every=(), python=True)
    lasting.max_concurrency, lasting.longest = None, LEASE
    limited.once_per_second = lasting.once_per_second = 0
    programs = Load(job_ledger, seconds, manual_jobs=2, batch=3, batches_per_second=0.5, once_per_second=0.2)
    programs.every, programs.writing, programs.max_concurrency = ("PT5S",), 0.5, None
    return _seeded(rng, bulk, limited, lasting, programs)


def light(seconds: float, rate: float, job_ledger: Path, rng: random.Random) -> list[Load]:
    """The same in small."""
    functions = Load(job_ledger, seconds, batches_per_second=rate / 10, python=True, cancels_per_second=2)
    functions.workflows_per_second = 1
    programs = Load(job_ledger, seconds, manual_jobs=2, batch=4, batches_per_second=1, once_per_second=0.5)
    programs.every, programs.writing = ("PT2S",), 0.5
    return _seeded(rng, functions, programs)


def _seeded(rng: random.Random, *loads: Load) -> list[Load]:
    for load in loads:
        load.seed = rng.randrange(2**32)
    return list(loads)


@dataclass(frozen=True)
class Plan:
    """How big a round is."""

    seconds: float
    seed: int
    servers: int = 3
    workers: int = 5
    slots: int = 16
    rate: float = 330.0  # runs a second
    faults_every: float = 4.0  # faults that end processes cost a core for a while; two cores must do the work beside
    loads: Callable[[float, float, Path, random.Random], list[Load]] = heavy


@dataclass
class Outcome:
    """What a round did, and what the checker says of it."""

    plan: Plan
    evidence: Evidence
    breaches: list[Breach]
    faults: list[Fault]
    repeats: int
    loaded: tuple[float, float]  # Unix times between which the load ran
    counted: Counter[str] = field(default_factory=Counter)
    took: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        faults = ", ".join(f"{n} × {what}" for what, n in sorted(Counter(f.kind for f in self.faults).items()))
        losses = sum(run.get("losses") or 0 for run in self.evidence.runs)
        took = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.took.items())
        return (
            f"seed {self.plan.seed}: {faults}; {summary(self.evidence)}; {losses} losses, "
            f"{self.counted['tocsin_superseded_total']} reports superseded, "
            f"{self.counted['requests duplicated']} requests duplicated and {self.counted['replies cut']} replies cut "
            f"on their way, {self.repeats} repeated by the driver; {took}; {len(self.breaches)} breaches"
        )


async def play(site: Site, database: OwnDatabase, plan: Plan) -> Outcome:
    """Load and faults for `plan.seconds`; then heal, drain, and look at it from outside."""
    rng, began = random.Random(plan.seed), time.monotonic()
    took: dict[str, float] = {}

    def lap(what: str) -> None:
        took[what] = time.monotonic() - began - sum(took.values())
        progress.phase = what

    progress = Progress(site.job_ledger, plan.seconds)
    clocks = step_clocks(site.folder, ["server-1", "worker-1"])
    async with connected(site, database, plan, clocks) as net, progress.shown():
        nemesis = Nemesis(site, net, database, clocks, rng)
        progress.faults = nemesis.faults
        async with Driver([link.url for link in net.clients], site.keys["key"], site.client_ledger) as driver:
            lap("start")
            loaded_from = time.time()
            async with asyncio.TaskGroup() as going:
                loads = plan.loads(plan.seconds, plan.rate, site.job_ledger, rng)
                parts = [going.create_task(run_load(driver, load)) for load in loads]
                going.create_task(nemesis.rage(max(plan.seconds - _CALM, 1), plan.faults_every))
            made = Made.all(part.result() for part in parts)
            loaded = loaded_from, time.time()
            lap("load")
            net.heal()
            await heal(site)
            await caught_up(driver, made, 60 + 2 * plan.seconds)
            await stop_schedules(driver, made)
            lap("heal")
            await wait_until_ended(driver, made, 60 + 2 * plan.seconds)
            lap("drain")
            evidence = await look(site, driver)
            breaches = check(evidence)
            lap("check")
        for server in site.servers:
            await nemesis.count(server)
        for link in net.links:
            nemesis.counted.update(link.counted)
    return Outcome(plan, evidence, breaches, nemesis.faults, driver.repeats, loaded, nemesis.counted, took)


async def look(site: Site, driver: Driver) -> Evidence:
    """What the ledgers and the API say, not by way of any proxy."""
    target = Target(site.servers[0].url, site.keys["key"], driver.tag, apart=1.0, settle=0, slack=_SETTLING)
    return await collect(target, [site.client_ledger], [site.job_ledger])


def step_clocks(folder: Path, names: Iterable[str]) -> dict[str, ClockShim]:
    """A clock of its own for each of these processes; none where there is no C compiler."""
    clocks = {}
    if shutil.which("cc") or shutil.which("gcc"):
        for name in names:
            place = folder / f"clock-{name}"
            place.mkdir(mode=0o755)
            clocks[name] = ClockShim(place)
    return clocks


@contextlib.asynccontextmanager
async def connected(site: Site, database: OwnDatabase, plan: Plan, clocks: dict[str, ClockShim]) -> AsyncIterator[Net]:
    """The site's processes, each with a proxy on every way it has. Every second worker has all servers behind its way,
    as behind a load balancer; the others have one."""
    net, rng = Net([], {}, {}), random.Random(plan.seed)
    try:
        for n in range(plan.servers):
            name = f"server-{n + 1}"
            net.databases[name] = await Link([database.address], rng=rng).open()
            server = await site.server(name, start=False, database_url=database.url_by(net.databases[name].port))
            server.env |= clocks[name].env if name in clocks else {}
            net.clients.append(await Link([("127.0.0.1", server.port)], http=True, rng=rng).open())
        await asyncio.gather(*(server.start() for server in site.servers))
        everyone = [("127.0.0.1", server.port) for server in site.servers]
        for n in range(plan.workers):
            name, own = f"worker-{n + 1}", everyone[n % plan.servers]
            net.workers[name] = await Link(everyone if n % 2 else [own], http=True, rng=rng).open()
        await asyncio.gather(*(_worker(site, name, link, plan, clocks.get(name)) for name, link in net.workers.items()))
        yield net
    finally:
        await net.close()


async def _worker(site: Site, name: str, link: Link, plan: Plan, clock: ClockShim | None) -> None:
    worker = await site.worker(name, link.url, slots=plan.slots, start=False)
    worker.env |= clock.env if clock else {}
    await worker.start()


async def heal(site: Site) -> None:
    """Every process that should live, lives, and every worker is one again."""
    processes: list[Server | Worker] = [*site.servers, *site.workers]
    for process in processes:
        if not process.alive:
            await process.start()

    async with site.client(site.servers[0]) as api:

        async def all_live() -> bool:
            reply = await api.get("/v1/workers", params={"limit": 500})
            live = {w["name"] for w in reply.json()["items"] if w["state"] == "live"} if reply.is_success else set()
            return live >= {w.name for w in site.workers}

        await until("every worker is live", all_live, 30, every=0.2)


async def caught_up(driver: Driver, made: Made, seconds: float) -> None:
    """What the schedules owe by now has been claimed: from here a cancel retracts the present, not the past."""
    healed = time.time()

    async def claimed() -> bool:
        for job_id in made.every:
            runs = (await driver.get("/v1/runs", job=job_id, limit=100))["items"]
            waiting = [r for r in runs if r["state"] in ("staged", "ready", "waiting") and not r["attempt"]]
            if any(instant(r["scheduled_for"]).timestamp() < healed for r in waiting):
                return False
        return time.time() > healed + _SETTLING

    await until("the schedules have caught up", claimed, seconds, every=0.3)


def main() -> int:
    parser = argparse.ArgumentParser(description="ruin a fleet under load, then check every promise")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--rate", type=float, default=Plan.rate, help="runs a second to submit")
    parser.add_argument("--every", type=float, default=Plan.faults_every, help="seconds between faults, on average")
    parser.add_argument("--keep", action="store_true", help="keep the logs and ledgers")
    given = parser.parse_args()
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="tocsin-round-"))
    folder.chmod(0o711)  # PostgreSQL runs as another user where we are root
    print(f"seed {seed}, {given.minutes:g} minutes, lease {LEASE:g} s, in {folder}", flush=True)
    plan = Plan(given.minutes * 60, seed, rate=given.rate, faults_every=given.every)
    outcome: Outcome | None = None
    try:
        with OwnDatabase(folder / "postgres", standby=True) as database, Site(folder, "", database.keys) as site:
            outcome = uvloop.run(play(site, database, plan))
    finally:
        if outcome is not None and not outcome.breaches and not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    figures = report.figures(outcome)
    report.write(figures, ROOT)
    print(outcome)
    print(report.text(figures))
    return 1 if outcome.breaches else 0 if all(bar["held"] for bar in figures["bars"]) else 2


if __name__ == "__main__":
    sys.exit(main())
