"""A small world: three nodes on one database, workers that do what they are told, and a clock in our hand.

A `Move` is one step of the product, with what the reference says of it. It is played alone (and held to the reference),
crashed at a point, or raced with another (and held to the ledger).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import asyncpg

from tests.simulation.book import Book, differences, read
from tests.simulation.ledger import Ledger
from tests.simulation.nodes import ManualClock, Node, install_clock, seed_ids
from tests.simulation.pieces import Broken, must
from tests.simulation.reference import Reference
from tocsin.errors import ApiProblem, Contention
from tocsin.failpoints import InjectedFault
from tocsin.flow import partitions
from tocsin.flow.shared.idempotency import Replay
from tocsin.flow.shared.lanes import LaneKey
from tocsin.model.access import Identity

HORIZON = timedelta(seconds=10)
LEASE = 10.0
LANE = LaneKey("default", "process", "")
_KEPT = ("migrations", "cluster", "tenants", "api_keys", "pools", "lanes", "event_feeds")


class Claimed(NamedTuple):
    """What a worker was given, whether or not it still has it."""

    worker: str
    run: str
    attempt: int
    fence: int
    claim_id: int
    special: bool


@dataclass
class Move:
    """One step: how the product does it, and what the reference makes of it. `whole`: it is one transaction."""

    name: str
    act: Callable[[Node], Awaitable[Any]]
    expect: Callable[[Reference, Any], None]
    whole: bool = True
    learn: Callable[[Any], None] | None = None
    key: str | None = None
    refuses: Callable[[Book], bool] = lambda _: False


class World:
    """The database, its nodes, and what is known of it."""

    def __init__(self, url: str, observer: asyncpg.Connection) -> None:
        self.observer = observer
        self.clock = ManualClock(observer)
        self.nodes = [Node(url, self.clock) for _ in range(3)]
        self.steps = self.races = self.crashes = self.examples = 0
        self.lane_id = 0
        self.who = Identity("00000000-0000-7000-8000-000000000000", "sim", "platform", 1, "default")
        self._turn = itertools.count()
        self._tables: list[str] = []

    @classmethod
    async def make(cls, url: str, superuser_url: str) -> World:
        """In a migrated database of its own."""
        world = cls(url, await install_clock(superuser_url))
        await world.clock.restart()
        for node in world.nodes:
            await node.db.open()
            world.lane_id = (await node.lanes.intern({LANE: None}))[LANE]
        await partitions.make_ahead(world.nodes[0].db)
        tables = await world.observer.fetch(
            "select relname::text from pg_class where relnamespace = 'tocsin'::regnamespace"
            " and relkind in ('r', 'p') and not relispartition and relname <> all($1::text[])",
            _KEPT,
        )
        world._tables = [row[0] for row in tables]
        tenant = await world.observer.fetchrow("select id, slug from tenants order by id limit 1")
        world.who = world.who._replace(tenant_id=tenant["id"], tenant=tenant["slug"])
        return world

    async def close(self) -> None:
        seed_ids(None)
        for node in self.nodes:
            await node.db.close()
        await self.observer.close()

    async def begin(self, seed: int) -> None:
        """An empty world at the beginning of its time."""
        seed_ids(seed)
        # Now and then the tables are made anew: what was deleted clogs them.
        if self.examples % 100 == 0:
            await self.observer.execute(f"truncate {', '.join(self._tables)} cascade")
        else:
            await self.observer.execute(";".join(f"delete from {table}" for table in self._tables))
        await self.clock.restart()
        self.examples += 1
        self.rng = random.Random(seed)
        self.ledger = Ledger()
        self.claims: list[Claimed] = []
        self.script: list[str] = []
        self._turn = itertools.count()
        self.book = await read(self.observer)

    @property
    def now(self) -> datetime:
        return self.clock.now()

    def _next_node(self) -> Node:
        return self.nodes[next(self._turn) % len(self.nodes)]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def advance(self, by: timedelta) -> None:
        self.script.append(f"{by} later")
        await self.clock.set(self.now + by)

    # ── moves ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def play(self, move: Move) -> Any:
        """Alone: what it leaves is what the reference says, to the last column."""
        self.script.append(move.name)
        self.steps += 1
        try:
            result: Any = await move.act(self._next_node())
        except (ApiProblem, Replay) as refused:
            result = refused
        await self._compare(move, result)
        if move.learn is not None and not isinstance(result, (ApiProblem, Replay)):
            move.learn(result)
        return result

    async def crash(self, move: Move, point: int) -> None:
        """The node dies at a point of the step: nothing of a transaction is left, or all of it."""
        self.script.append(f"{move.name} crashes at point {point}")
        self.steps += 1
        node = self._next_node()
        node.gate.arm(point, crash=True)
        try:
            await move.act(node)
        except (InjectedFault, ApiProblem, Replay):
            pass
        finally:
            node.gate.let_go()
        self.crashes += 1
        got = await read(self.observer)
        if move.whole and any(differences(self.book, got)):
            await self._compare(move, None, got)
        else:
            self._accept(got)

    async def race(self, first: Move, second: Move, point: int, later: timedelta) -> None:
        """`first` is stopped at a point, `second` begins, time passes, and both come to their end."""
        self.script.append(f"{first.name} stopped at point {point}, then {second.name}, {later} later")
        self.steps += 2
        a, b = self._next_node(), self._next_node()
        a.gate.arm(point, crash=False)
        one = asyncio.ensure_future(first.act(a))
        await _either(one, a.gate.reached.wait())
        two = asyncio.ensure_future(second.act(b))
        await self._done_or_blocked(two)
        if later:
            await self.clock.set(self.now + later)
        a.gate.let_go()
        results = await asyncio.gather(one, two, return_exceptions=True)
        self.races += 1
        for move, result in zip((first, second), results, strict=True):
            if isinstance(result, (ApiProblem, Replay)):
                continue
            if isinstance(result, BaseException):
                raise result
            if move.learn is not None:
                move.learn(result)
        self._accept(await read(self.observer))

    async def _done_or_blocked(self, task: asyncio.Future[Any]) -> None:
        while not task.done():
            await asyncio.wait([task], timeout=0.002)
            if await self.observer.fetchval("select exists (select from pg_locks where not granted)"):
                return

    async def _compare(self, move: Move, result: Any, got: Book | None = None) -> None:
        got = got or await read(self.observer)
        reference = Reference(self.book, got, self.now, HORIZON, self.who.tenant_id)
        if isinstance(result, Contention):
            raise Broken(f"{move.name} was alone and met {result}")
        repeated = move.key is not None and move.key in self.book.keys
        must(repeated == isinstance(result, Replay), f"{move.name}: {result!r}")
        refused = not repeated and move.refuses(self.book)
        must(refused == isinstance(result, ApiProblem), f"{move.name}: {result!r}")
        if not repeated and not isinstance(result, ApiProblem):
            move.expect(reference, result)
            if move.key is not None:
                reference.want.keys.add(move.key)
        reference.want.replaced = got.replaced
        found = list(differences(reference.want, got))
        if found:
            raise Broken(f"after {move.name} at {self.now}:\n" + "\n".join(f"  {what}" for what in found))
        self._accept(got)

    def _accept(self, got: Book) -> None:
        self.ledger.check(self.book, got)
        self.book = got

    def told(self) -> str:
        """What was done, for whoever reads a failure."""
        return "\n".join(self.script)


async def _either(task: asyncio.Future[Any], event: Awaitable[Any]) -> None:
    waiting = asyncio.ensure_future(event)
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def chosen(items: Sequence[Any], number: int) -> Any:
    """One of them, the last ones by the lowest numbers: what happened lately is what the next step is about."""
    return items[-1 - number % len(items)]
