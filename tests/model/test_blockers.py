"""What stands in a run's way, in order and in words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.blockers import (
    CODES,
    MANY,
    Awaited,
    Breaker,
    Earlier,
    End,
    Facts,
    Fleet,
    Limit,
    Queue,
    Quota,
    Throttle,
    blockers,
    why_ended,
    why_waiting,
)
from tocsin.model.estimate import Pace, latest
from tocsin.model.limits import Rate
from tocsin.model.states import REASONS

NOW = datetime(2031, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
IDLE = Fleet("default", "process", "", {}, None, 2, 2, 2, 2, 2, 2, 2, (), 16, 16)


def facts(**given: Any) -> Facts:
    return Facts(NOW, 0, NOW, IDLE, Queue())._replace(**given)


WAYS: list[dict[str, Any]] = [
    {"suspended_since": NOW},
    {"paused_since": NOW},
    {"ready_at": NOW + SECOND},
    {"ready_at": NOW + SECOND, "attempt": 2},
    {"pending": 2, "awaited": [Awaited("extract", "a", "running", "active"), Awaited("b", None, None, "cancelled")]},
    {"earlier": [Earlier("a", NOW)], "overlap": "replace"},
    {"quota": Quota(3, 3)},
    {"limits": [Limit(None, 1, 1, ["a"]), Limit("key", 2, 2)]},
    {"throttle": Throttle("key", Rate(SECOND, 1), NOW + SECOND, 3)},
    {"breaker": Breaker("billing", "open", NOW, None)},
    {"pool_paused_since": NOW},
    {"shut_out": True},
    {"fleet": IDLE._replace(able=0, labelled=0)},
    {"fleet": IDLE._replace(free=0)},
    {"fleet": IDLE._replace(roomy=0)},
    {"queue": Queue(40, 1, [(1, 500), (2, 500)])},
    {"queue": Queue(MANY + 1)},
]


@given(st.lists(st.sampled_from(WAYS), max_size=len(WAYS)))
def test_all_are_named_in_the_one_order(chosen: list[dict[str, Any]]) -> None:
    given_: dict[str, Any] = {}
    for way in chosen:
        given_ |= way
    found = blockers(facts(**given_))
    assert bool(found) == bool(given_.keys() - {"attempt", "overlap"})
    places = [list(CODES).index(blocker.code) for blocker in found]
    assert places == sorted(places)
    assert all(blocker.message and not blocker.message.endswith(".") for blocker in found)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way))
def test_what_nobody_can_foresee_is_not_foreseen(way: dict[str, Any]) -> None:
    found = blockers(facts(**way, lasts=SECOND, pace=Pace(60, 60.0)))
    known = latest(blocker.over for blocker in found)
    unforeseen = {
        "tenant_suspended",
        "job_paused",
        "parent",
        "breaker",
        "pool_paused",
        "pool_closed",
        "no_worker",
        "placement",
    }
    for_ever = unforeseen & {blocker.code for blocker in found}
    unknown = way.get("overlap") == "replace" or way.get("queue", Queue()).mine > MANY
    assert (known is None) == (bool(for_ever) or unknown)


def test_nothing_in_the_way_is_said_too() -> None:
    assert blockers(facts()) == []
    assert "the next claim takes it" in why_waiting([], None)
    assert "(rate) is over" in why_waiting([], "rate")


def test_what_is_full_now_is_not_in_the_way_of_what_is_due_later() -> None:
    full: dict[str, Any] = {"fleet": IDLE._replace(free=0), "limits": [Limit(None, 1, 1)], "quota": Quota(1, 1)}
    assert [blocker.code for blocker in blockers(facts(**full))] == ["quota", "limit", "busy"]
    [later] = blockers(facts(ready_at=NOW + SECOND, **full))
    assert later.over is not None and later.over.at == NOW + SECOND


def test_an_occurrence_that_will_be_skipped_has_no_start() -> None:
    waits, skipped = (
        blockers(facts(earlier=[Earlier("a", NOW)], overlap=overlap, lasts=SECOND))[0] for overlap in ("queue", "skip")
    )
    assert waits.over is not None and skipped.over is None


def test_a_limit_with_room_is_no_limit() -> None:
    assert blockers(facts(limits=[Limit(None, 2, 1)], quota=Quota(2, 3))) == []
    assert blockers(facts(throttle=Throttle(None, Rate(SECOND, 2), NOW + SECOND))) == []


def test_a_queue_that_was_not_counted_to_its_end_names_no_number_of_tenants() -> None:
    [found] = blockers(facts(queue=Queue(20_000, 1, [(1, 5_000), (1, 5_001)])))
    assert found.message.endswith("more than 10,000 runs of other tenants that share the pool stand before it")


def test_in_one_order_weights_do_not_count() -> None:
    [fair] = blockers(facts(queue=Queue(20, 1, [(1, 500)])))
    [ordered] = blockers(facts(queue=Queue(20, 1, [(1, 500)], in_one_order=True)))
    assert "and 21 runs of 1 other tenant" in fair.message
    assert "and 500 runs of 1 other tenant" in ordered.message


def test_who_waits_for_others_is_told_for_whom() -> None:
    awaited = [Awaited("extract", "a", "running", "active"), Awaited("load", None, None, "active")]
    [found] = blockers(facts(pending=3, awaited=awaited, fleet=IDLE._replace(free=0)))
    told = "3 runs that it depends on have not ended: extract is running, load has no run yet and 1 more"
    assert (found.code, found.message, found.runs) == ("parent", told, ["a"])
    [found] = blockers(facts(pending=1, awaited=[Awaited("b", None, None, "cancelled")]))
    assert found.message == "1 run that it depends on has not ended: b is cancelled and comes no more"


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_words(reason: str) -> None:
    told = why_ended(End("skipped", None, reason, 1, 0, 0, 4, None, 7))
    assert not told.startswith(reason)
    assert told.endswith("(7 occurrences)")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (End("dead", "failed", None, 4, 4, 0, 4, "ValueError: no"), "4 of 4 attempts failed; the last time with Value"),
        (End("dead", "failed", None, 1, 1, 0, 4, "GiveUp: no"), "a way that is not tried again"),
        (End("dead", "lost", None, 3, 0, 3, 4, None), "3 workers that had it went away"),
        (End("cancelled", "cancelled", None, 1, 0, 0, 4, None), "somebody cancelled it"),
    ],
)
def test_an_end_is_told(end: End, words: str) -> None:
    assert words in why_ended(end)
