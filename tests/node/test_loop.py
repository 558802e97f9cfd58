"""loop: whatever a database says, no loop of a node dies of it; each counts, backs off, and comes back."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator

import asyncpg
import pytest

from tests import PATIENCE
from tests.flow.kit import Scene
from tocsin.failpoints import Failpoints
from tocsin.flow.shared.transitions import Hint
from tocsin.node import loop as module
from tocsin.node.events import Wanted
from tocsin.node.loop import Loop
from tocsin.telemetry import LOOP_ERRORS

FAULTS: dict[str, type[Exception]] = {
    "40001": asyncpg.SerializationError,
    "driver": asyncpg.InternalClientError,
    "40P01": asyncpg.DeadlockDetectedError,
    "55P03": asyncpg.LockNotAvailableError,
    "53300": asyncpg.TooManyConnectionsError,
    "57P01": asyncpg.AdminShutdownError,
    "25006": asyncpg.ReadOnlySQLTransactionError,
    "53100": asyncpg.DiskFullError,
    "reset": ConnectionResetError,
    "ours": ZeroDivisionError,
}


class Troubles(Failpoints):
    """Raises each fault once in each loop, whenever it next wants a connection."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._left: dict[str, Iterator[str]] = {name: iter(FAULTS) for name in names}
        self.raised: dict[str, list[str]] = defaultdict(list)

    async def hit(self, name: str) -> None:
        task = asyncio.current_task()
        who = task.get_name() if task is not None else ""
        if not name.startswith("borrow.") or who not in self._left:
            return
        fault = next(self._left[who], None)
        if fault is not None:
            self.raised[who].append(fault)
            raise FAULTS[fault](f"a fault of the test's: {fault}")


def errors(name: str) -> float:
    return LOOP_ERRORS.labels(name)._value.get()  # type: ignore[no-any-return]


async def test_every_loop_survives_every_fault(live: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_BACKOFF", 0.1)
    node, who = live.node, await live.who()
    names = [one.name for one in node._loops]
    assert len(set(names)) == len(names) >= 8
    # Else the loops of events and of logs sleep.
    [run] = await live.ask(await live.job())
    listeners = [node.events.stream(who, Wanted(), None), node.tails.stream(who, run, None, None, None)]
    for listener in listeners:
        await anext(listener)
    before = {name: errors(name) for name in names}
    node.db.failpoints = troubles = Troubles(names)
    async with asyncio.timeout(PATIENCE):
        while any(len(troubles.raised[name]) < len(FAULTS) for name in names):
            node.whisper.say([Hint(0, who.tenant_id, node.db.clock.now(), node.db.clock.now())])
            for one in node._loops:
                one.wake()
            await asyncio.sleep(0.02)
        await asyncio.gather(*(turns_well(one) for one in node._loops))
    for listener in listeners:
        await listener.aclose()
    failed = {name: errors(name) - before[name] for name in names}
    # The sweeper does its other work although one step fails: a turn can have several faults.
    assert 0 < failed.pop("sweeper") <= len(FAULTS)
    assert failed == dict.fromkeys(failed, len(FAULTS))


async def turns_well(one: Loop) -> None:
    """Wait for a turn that does not fail."""
    went_well, turn = asyncio.Event(), one.run_once

    async def watched() -> float:
        pause = await turn()
        went_well.set()
        return pause

    one.run_once = watched  # type: ignore[method-assign]
    one.wake()
    await went_well.wait()


class Unlucky(Loop):
    """Its turns end as the test says."""

    name = "unlucky"

    def __init__(self, *ends: BaseException) -> None:
        super().__init__()
        self.ends = list(ends)
        self.failed, self.turned = asyncio.Event(), asyncio.Event()

    async def run_once(self) -> float:
        if self.ends:
            self.failed.set()
            raise self.ends.pop(0)
        self.turned.set()
        return 60.0


async def test_something_cancelled_within_a_turn_does_not_end_the_loop() -> None:
    loop = Unlucky(asyncio.CancelledError(), RuntimeError("broken"))
    loop.start()
    await asyncio.wait_for(loop.turned.wait(), PATIENCE)
    await asyncio.wait_for(loop.stop(), PATIENCE)


async def test_a_loop_stops_at_once_while_it_backs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHORTEST_BACKOFF", 10 * PATIENCE)
    monkeypatch.setattr(module, "_LONGEST_BACKOFF", 20 * PATIENCE)
    loop = Unlucky(RuntimeError("broken"))
    loop.start()
    await loop.failed.wait()
    await asyncio.wait_for(loop.stop(), PATIENCE)
    assert not loop.turned.is_set()


async def test_back_off_is_short_enough_to_notice_a_database_that_is_back() -> None:
    loop = Unlucky()
    waits = [loop._backoff(RuntimeError("gone")) for _ in range(200)]
    assert all(0.05 <= wait <= 2.0 for wait in waits)
    assert max(waits[:2]) <= 0.4 < max(waits)
    assert len(set(waits)) > 190, "loops of many nodes must not come back at the same instant"


async def test_a_turn_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAST_TURN", 0.1)

    class Endless(Unlucky):
        async def run_once(self) -> float:
            self.turned.set()
            await asyncio.Event().wait()
            return 0.0

    loop = Endless()
    loop.start()
    await loop.turned.wait()
    await asyncio.wait_for(loop.stop(), PATIENCE)
