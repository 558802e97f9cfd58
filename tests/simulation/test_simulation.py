"""The simulation itself: a round of it, that its seed repeats it, and that it would notice."""

from __future__ import annotations

import os
import time

import pytest

from tests.simulation.rounds import play_round
from tests.simulation.world import World

SEED = int(os.environ.get("SIMULATION_SEED", "1"))
EXAMPLES = 60


def test_what_every_step_leaves_is_what_the_reference_says(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    before, began = (world.examples, world.steps), time.monotonic()
    with capsys.disabled():
        print(f"\nsimulation: SIMULATION_SEED={SEED}")
        play_round(SEED, EXAMPLES)
        examples, steps, took = world.examples - before[0], world.steps - before[1], time.monotonic() - began
        print(f"simulation: {examples} examples, {steps} steps in {took:.1f} s; {world.races} races")
    assert steps > 10 * EXAMPLES
    assert world.races and world.crashes
