"""autoscale: a pool wants what its load needs, not less when there is more to do, and nothing when there is nothing."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.autoscale import BUSY, DRAIN, Load, Sample, load_of, wanted_workers

counts = st.integers(0, 10**6)
rates = st.floats(0, 1e5, allow_nan=False)
services = st.none() | st.floats(0, 1e5, allow_nan=False)
loads = st.builds(Load, counts, counts, rates, services)
slots = st.floats(1, 1000, allow_nan=False)


@given(loads, slots, counts)
def test_more_in_the_queue_never_wants_fewer(load: Load, slots: float, more: int) -> None:
    assert wanted_workers(load._replace(queued=load.queued + more), slots) >= wanted_workers(load, slots)


@given(loads, slots)
def test_larger_workers_are_fewer(load: Load, slots: float) -> None:
    assert wanted_workers(load, slots * 2) <= wanted_workers(load, slots)


@given(loads, slots)
def test_nobody_gets_two_slots(load: Load, slots: float) -> None:
    steady = load.arrivals * (load.service or 0) / BUSY
    assert wanted_workers(load, slots) <= math.ceil((steady + load.queued + load.running) / slots) + 1


@given(slots, services)
def test_an_empty_pool_to_which_nothing_comes_wants_nobody(slots: float, service: float | None) -> None:
    assert wanted_workers(Load(0, 0, 0.0, service), slots) == 0


@given(st.integers(1, 10**6), slots, services)
def test_what_waits_is_worth_a_worker(queued: int, slots: float, service: float | None) -> None:
    assert wanted_workers(Load(queued, 0, 0.0, service), slots) >= 1


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0.01, 50))
def test_wanted_slots_are_enough_for_the_backlog(queued: int, slots: int, service: float) -> None:
    workers = wanted_workers(Load(queued, 0, 0.0, service), slots)
    assert queued * service <= workers * slots * DRAIN * (1 + 1e-6)


def test_what_comes_in_is_what_was_handed_out_and_what_the_queue_grew_by() -> None:
    load = load_of([Sample(0.0, 100, 0, 4), Sample(10.0, 200, 50, 6)])
    assert load == Load(50, 6, 15.0, 0.5)
    assert wanted_workers(load, 1) == math.ceil(15 * 0.5 / BUSY + 50 * 0.5 / DRAIN)


def test_long_runs_keep_their_workers_and_those_that_wait_get_slots_of_their_own() -> None:
    load = load_of([Sample(0.0, 7, 10, 5), Sample(60.0, 7, 10, 5)])
    assert wanted_workers(load, 1) == 15
    assert wanted_workers(load, 4) == 4


def test_a_burst_of_short_runs_does_not_want_a_slot_each() -> None:
    load = load_of([Sample(0.0, 0, 10_000, 10), Sample(10.0, 1_000, 9_000, 10)])
    assert load.service == 0.1 and load.arrivals == 0
    assert wanted_workers(load, 10) == 2


def test_one_worker_finds_out_how_long_runs_take() -> None:
    assert wanted_workers(load_of([Sample(0.0, 0, 5_000, 0)]), 8) == 1
