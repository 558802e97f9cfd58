"""A world driven by hand, step by step, for what the simulation has found."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from tests.simulation import moves
from tests.simulation.book import Job, Run
from tests.simulation.moves import Choices, Maker
from tests.simulation.world import World
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.scalars import Duration
from tocsin.model.targets import ProcessTarget

T = TypeVar("T")


def every(seconds: float, **more: Any) -> Schedule:
    return Schedule(every=Duration(timedelta(seconds=seconds)), **more)


class Script:
    """Moves without chance; each is held to the reference as it is in the simulation."""

    def __init__(self, world: World, loop: asyncio.AbstractEventLoop) -> None:
        self.world, self._loop = world, loop

    @classmethod
    def begin(cls, world: World, loop: asyncio.AbstractEventLoop) -> Script:
        """In an empty world."""
        loop.run_until_complete(world.begin(0))
        return cls(world, loop)

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(step)

    def later(self, seconds: float) -> None:
        self.run(self.world.advance(timedelta(seconds=seconds)))

    def move(self, maker: Maker, *numbers: int) -> Any:
        """Make a move; `numbers` are its choices, in their order."""
        move = maker(self.world, Choices(numbers))
        assert move is not None
        return self.run(self.world.play(move))

    def job(self, **spec: Any) -> Job:
        known = set(self.world.book.jobs)
        self.run(self.world.play(moves.submit_job(self.world, JobSpec(target=ProcessTarget(command=["true"]), **spec))))
        [new] = self.world.book.jobs.keys() - known
        return self.world.book.jobs[new]

    def runs(self, *states: str) -> list[Run]:
        """The live runs in these states, the earliest first."""
        return [run for run in self.world.book.runs.values() if not states or run.state in states]
