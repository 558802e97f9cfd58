"""The state machine that plays moves at random, and the end of each example: everything that is due comes to an end."""

from __future__ import annotations

import asyncio
import traceback
from datetime import timedelta
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.simulation import moves
from tests.simulation.moves import COMMON, MAKERS, RARE, Choices
from tests.simulation.pieces import Broken, must
from tests.simulation.world import Move, World

_NAMES = [maker.__name__.strip("_") for maker in (*COMMON, *COMMON, *RARE)]
_PAUSES = [timedelta(seconds=s) for s in (1, 2, 0.001, 5, 1, 2.5, 3, 10.5, 30, 61, 9.999, 2, 120, 400, 4000)]
_PATIENCE = 100  # turns without an end: what was lost comes back behind all that its job has queued under a limit
_NUMBER = st.integers(0, 839)  # every option of up to eight is as likely as the next
_NUMBERS = st.lists(_NUMBER, min_size=16, max_size=16)


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

    def _make(self, name: str, numbers: list[int]) -> Move | None:
        move = MAKERS[name](self.world, Choices(numbers))
        if move is not None and move.key is not None:
            self.keyed.append(move)
        return move

    @initialize(seed=st.integers(0, 2**32), numbers=st.lists(_NUMBER, min_size=32, max_size=32), jobs=st.integers(1, 4))
    def begin(self, seed: int, numbers: list[int], jobs: int) -> None:
        self._run(self.world.begin(seed))
        for name, at in (("register", 0), *(("new_job", 8 * n) for n in range(jobs))):
            self.play(name, numbers[at:])

    @rule(by=st.sampled_from(_PAUSES))
    def time_passes(self, by: timedelta) -> None:
        self._run(self.world.advance(by))

    @rule(name=st.sampled_from(_NAMES), numbers=_NUMBERS)
    def play(self, name: str, numbers: list[int]) -> None:
        move = self._make(name, numbers)
        if move is not None:
            self._run(self.world.play(move))

    @rule(name=st.sampled_from(_NAMES), numbers=_NUMBERS)
    def play_another(self, name: str, numbers: list[int]) -> None:
        self.play(name, numbers)

    @rule(name=st.sampled_from(_NAMES), numbers=_NUMBERS, point=st.integers(1, 8))
    def crash(self, name: str, numbers: list[int], point: int) -> None:
        move = self._make(name, numbers)
        if move is not None:
            self._run(self.world.crash(move, point))

    @rule(
        names=st.tuples(st.sampled_from(_NAMES), st.sampled_from(_NAMES)),
        numbers=_NUMBERS,
        point=st.integers(1, 8),
        later=st.sampled_from([timedelta(0), timedelta(seconds=3)]),
    )
    def race(self, names: tuple[str, str], numbers: list[int], point: int, later: timedelta) -> None:
        first, second = self._make(names[0], numbers), self._make(names[1], numbers[::-1])
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
    best, patience = len(due) + 1, _PATIENCE
    while left := [r for r in world.book.runs.values() if r.id in due and not world.book.jobs[r.job].on_hold]:
        best, patience = (len(left), _PATIENCE) if len(left) < best else (best, patience - 1)
        if patience == 0:
            raise Broken("never end: " + "; ".join(f"{r.id} {r.state} {r.blocked_by or ''} {r.ready_at}" for r in left))
        await _turn(world)
        await world.advance(timedelta(seconds=1))


async def _turn(world: World) -> None:
    """What the loops of a node do in a second, and a worker that does all it is given."""
    nothing = Choices(())
    for maker in (moves.reap_, moves.plan_, moves.expire, moves.misfires, moves.replace_, moves.release, moves.promote):
        move = maker(world, nothing)
        assert move is not None
        await world.play(move)
    await world.play(moves.every_slot(world))
    held = [run for run in world.book.runs.values() if run.worker == moves.GOOD]
    if held:
        await world.play(moves.succeed(world, held))
    must(not any(run.worker == moves.GOOD for run in world.book.runs.values()), "the good worker holds nothing")
