"""A circuit breaker: when jobs that call the same dependency stop calling it, and how they begin again.

closed     Everybody goes. It opens as soon as so many of the last calls have failed.
open       Nobody goes; it waits for its cool-down, which doubles each time it opens again.
half_open  Canaries go, one, then two, then four: each wave when the one before it has ended well. A wave that fails
           opens it again, the last one closes it.

After it has closed, what waited goes in waves that go on growing, up to a rate. An attempt counts only if it began
after the circuit came into its present state: what was under way when it opened says nothing about what it meets later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from tocsin.model.scalars import Duration

State = Literal["closed", "open", "half_open"]
LAST_WAVE = 8  # of canaries; when it has ended well, the circuit closes
_BETWEEN_WAVES = timedelta(seconds=0.05)  # small and often, so that others notice little of it
_CHECK_CANARIES = timedelta(seconds=1)  # their ends are heard of at once; this finds those that never end
_STRAGGLERS = timedelta(seconds=60)  # longer than any claim that still saw the circuit open, and parks by it
_CHECK_STRAGGLERS = timedelta(seconds=5)


class CircuitPolicy(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """When a circuit opens (`failure_ratio` of the last `calls`, of those within `window`), for how long, and how many
    of those that waited go a second, at most, once it has closed (`release_rate`)."""

    failure_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.5
    calls: Annotated[int, Meta(ge=1, le=100)] = 20
    window: Duration = Duration(timedelta(minutes=1))
    cooldown: Duration = Duration(timedelta(seconds=5))
    max_cooldown: Duration = Duration(timedelta(minutes=5))
    release_rate: Annotated[int, Meta(ge=1, le=10_000)] = 500

    def wrong(self) -> Iterator[tuple[str, str]]:
        """What decodes but means nothing: (path, why)."""
        for name in ("window", "cooldown", "max_cooldown"):
            if not 0.1 <= getattr(self, name).seconds <= 86_400:
                yield name, "must lie between 100 ms and a day"
        if self.max_cooldown.delta < self.cooldown.delta:
            yield "max_cooldown", "is shorter than cooldown"

    def is_failing(self, failed: int, of: int) -> bool:
        """Whether so many failures among so many calls are too many."""
        return failed >= self.failure_ratio * of

    def cools_for(self, trips: int) -> timedelta:
        """How long it stays open when it opens for the n-th time in a row."""
        return min(self.max_cooldown.delta, self.cooldown.delta * (1 << min(trips - 1, 30)))


class Call(NamedTuple):
    """The end of an attempt that a circuit counts."""

    began: datetime
    canary: bool
    failed: bool


class Past(NamedTuple):
    """A call that a closed circuit remembers."""

    at: datetime
    failed: bool


class Circuit(NamedTuple):
    """A circuit as it is kept. `next_at`: when to look at it again, None if nothing is to be done by itself."""

    state: State
    since: datetime
    by_hand: bool = False
    recent: tuple[Past, ...] = ()
    trips: int = 0  # how often it has opened without closing
    wave: int = 0  # how many may go at once; 0 while it is closed and nobody waits any more
    sent: int = 0  # how many of the wave went
    good: int = 0  # … and how they ended
    bad: int = 0
    next_at: datetime | None = None


class Turn(NamedTuple):
    """What a circuit is after its turn, and how many of those that wait go now; `canaries` may pass while it is half
    open."""

    circuit: Circuit
    release: int = 0
    canaries: bool = False


def opened(circuit: Circuit, policy: CircuitPolicy, now: datetime) -> Circuit:
    """It failed: nobody goes until it has cooled down."""
    trips = circuit.trips + 1
    return Circuit("open", now, trips=trips, recent=circuit.recent, next_at=now + policy.cools_for(trips))


def opened_by_hand(circuit: Circuit, now: datetime) -> Circuit:
    """Nobody goes until somebody closes it."""
    return Circuit("open", now, by_hand=True, recent=circuit.recent)


def closed(now: datetime, wave: int = LAST_WAVE) -> Circuit:
    """Everybody goes; what waited goes in waves that begin at twice this one."""
    return Circuit("closed", now, wave=2 * wave, next_at=now)


def counted(circuit: Circuit, policy: CircuitPolicy, calls: Sequence[Call], now: datetime) -> Circuit:
    """What becomes of it when these calls have ended, in this order."""
    for call in calls:
        if call.began < circuit.since:
            continue
        if circuit.state == "closed":
            circuit = _remember(circuit, policy, Past(now, call.failed))
            if policy.is_failing(sum(past.failed for past in circuit.recent), policy.calls):
                circuit = opened(circuit, policy, now)
        elif circuit.state == "half_open" and call.canary:
            circuit = circuit._replace(
                good=circuit.good + (not call.failed), bad=circuit.bad + call.failed, next_at=now
            )
            if call.failed and policy.is_failing(circuit.bad, circuit.sent):
                circuit = opened(circuit, policy, now)
    return circuit


def _remember(circuit: Circuit, policy: CircuitPolicy, past: Past) -> Circuit:
    kept = [p for p in (*circuit.recent, past) if p.at > past.at - policy.window.delta]
    return circuit._replace(recent=tuple(kept[-policy.calls :]))


def turned(circuit: Circuit, under_way: int, now: datetime) -> Turn:
    """What is to be done with it now. `under_way`: how many canaries have not ended. Say afterwards how many `went`."""
    if circuit.by_hand:
        return Turn(circuit._replace(next_at=None))
    match circuit.state:
        case "open":
            return Turn(Circuit("half_open", now, trips=circuit.trips, wave=1), 1, True)
        case "half_open" if under_way:
            return Turn(circuit._replace(next_at=now + _CHECK_CANARIES))
        case "half_open" if circuit.good and circuit.wave >= LAST_WAVE:
            after = closed(now, circuit.wave)
            return Turn(after, after.wave)
        case "half_open":
            # One of which all were cancelled, or which found nobody to send, is tried again.
            wave = circuit.wave * 2 if circuit.good else circuit.wave
            return Turn(circuit._replace(wave=wave, good=0, bad=0), wave, True)
        case "closed":
            return Turn(circuit, circuit.wave)


def went(turn: Turn, policy: CircuitPolicy, count: int, now: datetime) -> Circuit:
    """The circuit after a turn by which so many went. The next ones go when the rate has room for them, so that neither
    what has just recovered nor those who share the workers are overrun."""
    circuit = turn.circuit
    if not turn.release:
        return circuit
    if circuit.state == "half_open":
        return circuit._replace(sent=count, next_at=now + _CHECK_CANARIES)
    if count:
        largest = max(1, int(policy.release_rate * _BETWEEN_WAVES.total_seconds()))
        pause = max(_BETWEEN_WAVES, timedelta(seconds=count / policy.release_rate))
        return circuit._replace(wave=min(largest, 2 * circuit.wave), next_at=now + pause)
    if now < circuit.since + _STRAGGLERS:
        return circuit._replace(next_at=now + _CHECK_STRAGGLERS)
    return circuit._replace(wave=0, next_at=None)
