"""The state machine that plays moves at random, and the end of each example: everything that is due comes to an end."""

from __future__ import annotations

import asyncio
import traceback
from datetime import timedelta
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.simulation import moves
from tests.simulation.moves import COMMON, MAKERS, RARE
from tests.simulation.reference import Broken, must
from tests.simulation.world import Move, World

_NAMES = [maker.__name__.strip("_") for maker in (*COMMON, *COMMON, *RARE)]
_PAUSES = [timedelta(seconds=s) for s in (1, 5, 0.001, 2.5, 10.5, 30, 61, 9.999, 120, 400, 4000)]
_QUIET = 80


class Simulation(RuleBasedStateMachine):
    """One world for all examples; each begins with it empty."""

    world: ClassVar[World]
    loop: ClassVar[asyncio.AbstractEventLoop]
    failures: ClassVar[list[Exception]] = []  # the first is told at once: a shorter one may be long in coming

    def __init__(self) -> None:
        super().__init__()
        self.keyed: list[Move] = []
        self.broken = False

    def _run(self, step: Any) -> Any:
        try:
            return self.loop.run_until_complete(step)
        except Exception as error:
            if not self.broken:
                error.add_note(self.world.told())
                self.broken = True
                if not self.failures:
                    traceback.print_exception(error)
                self.failures.append(error)
            raise

    def _make(self, name: str, data: Any) -> Move | None:
        move = MAKERS[name](self.world, data.draw)
        if move is not None and move.key is not None:
            self.keyed.append(move)
        return move

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self._run(self.world.begin(seed))

    @initialize(data=st.data(), jobs=st.integers(2, 4))
    def populate(self, data: Any, jobs: int) -> None:
        for name in ("register", *("new_job",) * jobs):
            move = self._make(name, data)
            if move is not None:
                self._run(self.world.play(move))

    @rule(by=st.sampled_from(_PAUSES))
    def time_passes(self, by: timedelta) -> None:
        self._run(self.world.advance(by))

    @rule(name=st.sampled_from(_NAMES), data=st.data())
    def play(self, name: str, data: Any) -> None:
        move = self._make(name, data)
        if move is not None:
            self._run(self.world.play(move))

    @rule(name=st.sampled_from(_NAMES), data=st.data())
    def play_another(self, name: str, data: Any) -> None:
        self.play(name, data)

    @rule(name=st.sampled_from(_NAMES), data=st.data(), point=st.integers(1, 8))
    def crash(self, name: str, data: Any, point: int) -> None:
        move = self._make(name, data)
        if move is not None:
            self._run(self.world.crash(move, point))

    @rule(
        names=st.tuples(st.sampled_from(_NAMES), st.sampled_from(_NAMES)),
        data=st.data(),
        point=st.integers(1, 8),
        later=st.sampled_from([timedelta(0), timedelta(seconds=3)]),
    )
    def race(self, names: tuple[str, str], data: Any, point: int, later: timedelta) -> None:
        first, second = (self._make(name, data) for name in names)
        if first is not None and second is not None:
            self._run(self.world.race(first, second, point, later))

    @rule(number=st.integers(0, 5))
    def repeat(self, number: int) -> None:
        """The same call with the same key: once it has had its effect, it has none."""
        if self.keyed:
            self._run(self.world.play(self.keyed[-1 - number % len(self.keyed)]))

    def teardown(self) -> None:
        if not self.broken and hasattr(self.world, "book"):
            self._run(come_to_rest(self.world))


async def come_to_rest(world: World) -> None:
    """With one good worker and all loops turning, whatever is due by now ends, unless its job is paused."""
    due = {run.id for run in world.book.runs.values() if run.ready_at <= world.now or run.attempt > 0}
    await world.advance(timedelta(seconds=11))  # whoever held something is silent for longer than its lease
    for _ in range(_QUIET):
        left = [run for run in world.book.runs.values() if run.id in due and not world.book.jobs[run.job].on_hold]
        if not left:
            return
        await _turn(world)
        await world.advance(timedelta(seconds=1))
    raise Broken("never end: " + "; ".join(f"{r.id} {r.state} {r.blocked_by or ''} {r.ready_at}" for r in left))


async def _turn(world: World) -> None:
    """What the loops of a node do in a second, and a worker that does all it is given."""

    def first(strategy: st.SearchStrategy[Any]) -> Any:
        raise AssertionError(f"nothing is left to chance here: {strategy}")

    for maker in (moves.reap_, moves.plan_, moves.expire, moves.misfires, moves.release, moves.promote):
        move = maker(world, first)
        assert move is not None
        await world.play(move)
    await world.play(moves.every_slot(world))
    held = [run for run in world.book.runs.values() if run.worker == moves.GOOD]
    if held:
        await world.play(moves.succeed(world, held))
    must(not any(run.worker == moves.GOOD for run in world.book.runs.values()), "the good worker holds nothing")
