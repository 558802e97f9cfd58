"""Rounds of the simulation: one seed, so many examples, one world."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvloop
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conftest import Cluster
from tests.simulation.machine import Simulation
from tests.simulation.world import World

STEPS = 50


@contextlib.contextmanager
def open_world(cluster: Cluster) -> Iterator[World]:
    """A world in a database of its own, in which `play_round` plays."""
    loop = uvloop.new_event_loop()
    name = loop.run_until_complete(cluster.clone())
    world = loop.run_until_complete(World.make(cluster.url(name), cluster.as_superuser(name)))
    Simulation.loop, Simulation.world = loop, world
    try:
        yield world
    finally:
        loop.run_until_complete(world.close())
        loop.run_until_complete(cluster.drop(name))
        loop.close()


def play_round(number: int, examples: int, shrink: bool = False) -> None:
    """The examples of one seed. The same seed plays the same examples."""
    machine = seed(number)(type("Simulation", (Simulation,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            verbosity=Verbosity.normal,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        ),
    )
