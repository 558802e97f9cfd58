"""The circuit breaker: when it opens, how it is probed, and how those that wait go again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.circuit import (
    LAST_WAVE,
    Call,
    Circuit,
    CircuitPolicy,
    Turn,
    closed,
    counted,
    opened_by_hand,
    turned,
    went,
)
from tocsin.model.scalars import Duration

T = datetime(2026, 1, 1, tzinfo=UTC)
NEW = Circuit("closed", T)
POLICY = CircuitPolicy()
SECOND = timedelta(seconds=1)


def calls(*failed: bool, began: datetime = T, canary: bool = False) -> list[Call]:
    return [Call(began, canary, each) for each in failed]


def tripped(policy: CircuitPolicy = POLICY) -> Circuit:
    return counted(NEW, policy, calls(*[True] * policy.calls), T)


def probed(circuit: Circuit, now: datetime, *failed: bool) -> Circuit:
    """A turn whose canaries end like this."""
    circuit = went(turned(circuit, 0, now), POLICY, len(failed), now)
    return counted(circuit, POLICY, calls(*failed, began=now, canary=True), now)


@given(st.floats(0.01, 1), st.integers(1, 100))
def test_what_is_dead_opens_it_after_at_most_so_many_calls(ratio: float, most: int) -> None:
    policy = CircuitPolicy(failure_ratio=ratio, calls=most)
    circuit = NEW
    for _ in range(most):
        circuit = counted(circuit, policy, calls(True), T)
    assert circuit.state == "open"


@given(st.lists(st.booleans(), max_size=200), st.floats(0.05, 1), st.integers(1, 50))
def test_it_opens_exactly_when_that_share_of_the_last_calls_has_failed(
    failed: list[bool], ratio: float, most: int
) -> None:
    policy = CircuitPolicy(failure_ratio=ratio, calls=most)
    circuit = NEW
    for n, each in enumerate(failed, 1):
        circuit = counted(circuit, policy, calls(each), T)
        if sum(failed[max(0, n - most) : n]) >= ratio * most:
            assert circuit.state == "open"
            return
        assert circuit.state == "closed"


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 7))
def test_calls_told_together_count_like_calls_told_apart(failed: list[bool], size: int) -> None:
    at_once = counted(NEW, POLICY, calls(*failed), T)
    apart = NEW
    for start in range(0, len(failed), size):
        apart = counted(apart, POLICY, calls(*failed[start : start + size]), T)
    assert apart == at_once


def test_old_failures_are_forgotten() -> None:
    circuit = NEW
    for minute in range(100):
        circuit = counted(circuit, POLICY, calls(True), T + timedelta(minutes=minute))
    assert circuit.state == "closed"


def test_what_began_before_its_present_state_says_nothing() -> None:
    after = closed(T + SECOND)
    assert counted(after, POLICY, calls(*[True] * 100), T + 2 * SECOND) == after
    half = turned(tripped(), 0, T + SECOND).circuit._replace(sent=1)
    assert counted(half, POLICY, calls(True, canary=True), T + 2 * SECOND).state == "half_open"


@given(st.integers(1, 60))
def test_the_cool_down_doubles_up_to_its_cap(times: int) -> None:
    circuit, now, waits = tripped(), T, []
    for _ in range(times):
        assert circuit.state == "open" and circuit.next_at is not None
        waits.append((circuit.next_at - now).total_seconds())
        now = circuit.next_at
        circuit = probed(circuit, now, True)
    assert waits == [min(5.0 * 2**n, 300.0) for n in range(times)]


def test_canaries_come_in_growing_waves_until_it_closes() -> None:
    circuit, now, waves = tripped(), T, []
    while circuit.state != "closed":
        now += SECOND
        turn = turned(circuit, 0, now)
        waves.append(turn.release)
        circuit = went(turn, POLICY, turn.release, now)
        circuit = counted(circuit, POLICY, calls(*[False] * turn.release, began=now, canary=True), now)
    assert waves[:4] == [1, 2, 4, LAST_WAVE]
    assert circuit.trips == 0 and not any(past.failed for past in circuit.recent)
    while circuit.next_at is not None and len(waves) < 100:
        turn = turned(circuit, 0, circuit.next_at)
        waves.append(turn.release)
        circuit = went(turn, POLICY, turn.release if len(waves) < 20 else 0, circuit.next_at)
    assert all(2 * a == b or b == 25 for a, b in pairwise(waves[:19]))
    assert circuit.wave == 0 and circuit.state == "closed"


@pytest.mark.parametrize("rate", [1, 7, 500, 10_000])
def test_what_waited_goes_no_faster_than_the_rate(rate: int) -> None:
    policy = CircuitPolicy(release_rate=rate)
    circuit, went_at = closed(T), list[tuple[datetime, int]]()
    for _ in range(60):
        assert circuit.next_at is not None
        turn, now = turned(circuit, 0, circuit.next_at), circuit.next_at
        went_at.append((now, turn.release))
        circuit = went(turn, policy, turn.release, now)
    settled = went_at[10:]
    seconds = (settled[-1][0] - settled[0][0]).total_seconds()
    assert sum(count for _, count in settled[:-1]) == pytest.approx(rate * seconds, rel=0.01)


def test_nothing_more_goes_while_canaries_are_under_way() -> None:
    half = went(turned(tripped(), 0, T + SECOND), POLICY, 1, T + SECOND)
    turn = turned(half, 1, T + 2 * SECOND)
    assert turn.release == 0 and turn.circuit.state == "half_open"


@pytest.mark.parametrize(("failed", "opens"), [((True, False), True), ((True, False, False, False), False)])
def test_a_wave_fails_by_the_same_share(failed: tuple[bool, ...], opens: bool) -> None:
    half = turned(tripped(), 0, T + SECOND).circuit._replace(wave=len(failed), sent=len(failed))
    after = counted(half, POLICY, calls(*failed, began=T + SECOND, canary=True), T + SECOND)
    assert (after.state == "open") is opens
    assert after.trips == 2 if opens else after.good == 3


def test_a_wave_of_which_nothing_was_heard_is_sent_again() -> None:
    half = turned(tripped(), 0, T + SECOND).circuit._replace(wave=4, sent=3)
    again = turned(half, 0, T + 2 * SECOND)
    assert (again.release, again.canaries) == (4, True)


def test_what_is_parked_late_is_still_found() -> None:
    """A claim that saw it open may park a run after the last wave found nobody."""
    circuit = closed(T)
    assert went(Turn(circuit, 16), POLICY, 0, T + 30 * SECOND).next_at is not None
    assert went(Turn(circuit, 16), POLICY, 0, T + 61 * SECOND).next_at is None


def test_by_hand_it_stays_open() -> None:
    by_hand = opened_by_hand(NEW, T)
    assert by_hand.next_at is None
    assert turned(by_hand, 0, T + timedelta(days=1)) == Turn(by_hand)
    assert counted(by_hand, POLICY, calls(False, began=T + SECOND), T + SECOND) == by_hand


@given(st.lists(st.tuples(st.sampled_from(["good", "bad", "turn", "late"]), st.integers(0, 20)), max_size=60))
def test_while_it_is_open_nobody_goes_and_it_never_gets_stuck(steps: list[tuple[str, int]]) -> None:
    circuit, now, under_way = NEW, T, 0
    for what, count in steps:
        now += SECOND
        was = circuit
        if what == "turn" and circuit.next_at is not None and circuit.next_at <= now:
            turn = turned(circuit, under_way, now)
            assert not turn.release or turn.circuit.state != "open"
            sent = min(turn.release, count)
            circuit = went(turn, POLICY, sent, now)
            under_way = sent if turn.canaries else under_way
        elif what in ("good", "bad"):
            ended = min(count, under_way) if circuit.state == "half_open" else count
            canary = circuit.state == "half_open"
            circuit = counted(circuit, POLICY, calls(*[what == "bad"] * ended, began=now, canary=canary), now)
            under_way -= ended if canary else 0
        elif what == "late":
            circuit = counted(circuit, POLICY, calls(*[True] * count, began=was.since - SECOND), now)
            assert circuit == was
        assert circuit.next_at is not None or circuit.state == "closed", "somebody will look at it again"


@pytest.mark.parametrize(
    ("policy", "path"),
    [
        ({"window": "10ms"}, "window"),
        ({"cooldown": "2d", "max_cooldown": "2d"}, "cooldown"),
        ({"cooldown": "1m", "max_cooldown": "1s"}, "max_cooldown"),
    ],
)
def test_what_means_nothing_is_refused(policy: dict[str, str], path: str) -> None:
    given_ = CircuitPolicy(**{name: Duration.parse(text) for name, text in policy.items()})
    assert path in dict(given_.wrong())
    assert not list(POLICY.wrong())
