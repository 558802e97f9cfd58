"""The engine beside the oracle: next, last and count around one move of the clock, for one expression and its rules."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from random import Random

from tests.time.expressions import EXPRESSIONS
from tests.time.oracle import Expression, Owed, Window, instant, is_open
from tocsin.model import cron

SECOND = timedelta(seconds=1)
SEED = "acme/report"
# Where more is owed than this, the engine is asked at chosen seconds instead of walked from end to end.
_MOST_WALKED = 60


def rules(window: Window, text: str, turn: int) -> list[tuple[str, str]]:
    """The choices of (gap, overlap) that could matter at a move; what cannot matter there takes turns."""
    gaps, overlaps = ["next_valid", "skip"], ["first", "second", "both"]
    if is_open(Expression.read(text).hour):
        return [(gaps[turn % 2], overlaps[turn % 3])]
    if window.move.after > window.move.before:
        return [(gap, overlaps[turn % 3]) for gap in gaps]
    return [(gaps[turn % 2], overlap) for overlap in overlaps]


def differences(window: Window, rng: Random) -> Iterator[str | None]:
    """One for each comparison of the list: None, or what differs."""
    for turn, written in enumerate(EXPRESSIONS):
        text = cron.resolve(written, SEED)
        for gap, overlap in rules(window, text, turn + rng.randrange(6)):
            yield from compare(window, text, gap, overlap, rng)


def compare(window: Window, text: str, gap: str, overlap: str, rng: Random) -> Iterator[str | None]:
    """One for each comparison of a resolved expression: None, or what differs."""
    days, owed = cron.compile_cron(text, window.move.zone, gap, overlap), window.owed(text, gap, overlap)
    found = _walk(window, days, owed) if owed.count <= _MOST_WALKED else _probe(window, days, owed, rng)
    for what in found:
        yield f"{text} ({gap}, {overlap}), {window.move}: {what}" if what else None


def _walk(window: Window, days: cron.CronDays, owed: Owed) -> Iterator[str | None]:
    """Every owed instant of the window forwards, backwards and counted."""
    expected = [instant(second) for second in owed]
    low, high = instant(window.start - 1), instant(window.end)
    forwards, at = [], days.next_after(low)
    while at is not None and at < high:
        forwards.append(at)
        at = days.next_after(at)
    yield None if forwards == expected else f"forwards {_odd(forwards, expected)}"
    backwards, at = [], days.last_before(high, instant(window.start))
    while at is not None:
        backwards.append(at)
        at = days.last_before(at, instant(window.start))
    yield None if backwards[::-1] == expected else f"backwards {_odd(backwards, expected)}"
    count = days.count(low, high)
    yield None if count == owed.count else f"counts {count}, not {owed.count}"


def _probe(window: Window, days: cron.CronDays, owed: Owed, rng: Random) -> Iterator[str | None]:
    """Asked at the edges of the move and of its overlap, near the start, and anywhere; and counted as a whole."""
    move = window.move
    shift = abs(move.after - move.before)
    edges = {move.at - shift, move.at, move.at + shift, window.start + 60}
    probes = {second for edge in edges for second in (edge - 1, edge, edge + 1)}
    probes |= {rng.randrange(window.start, window.end) for _ in range(4)}
    for second in sorted(probes):
        if window.start < second < window.end:
            yield from _ask(window, days, owed, second)
    count = days.count(instant(window.start - 1), instant(window.end))
    yield None if count == owed.count else f"counts {count}, not {owed.count}"


def _ask(window: Window, days: cron.CronDays, owed: Owed, second: int) -> Iterator[str | None]:
    here, start, end = instant(second), instant(window.start), instant(window.end)
    following, expected = days.next_after(here - SECOND), owed.first_from(second)
    right = following is not None and (following >= end if expected is None else following == instant(expected))
    yield None if right else f"from {here} on comes {following}"
    last, expected = days.last_before(here, start), owed.last_before(second)
    yield None if last == (None if expected is None else instant(expected)) else f"before {here} comes {last}"
    count, expected = days.count(start - SECOND, here), owed.count_before(second)
    yield None if count == expected else f"counts {count} to {here}, not {expected}"


def _odd(found: list[datetime], expected: list[datetime]) -> str:
    odd = sorted(set(found) ^ set(expected))
    return f"{len(found)}, not {len(expected)}: {[str(at) for at in odd[:3]]}"
