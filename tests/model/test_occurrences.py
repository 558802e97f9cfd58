"""What was owed is told once: by its record if there is one, else as planned, as paused, or as missed unknown why."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.occurrences import Owed, Piece, Place, Record, Told, tell
from tocsin.model.timetable import TICK, Every

MINUTE = timedelta(minutes=1)
START = datetime(2026, 3, 1, tzinfo=UTC)
NOBODY = ""


def at(minute: int) -> datetime:
    return START + minute * MINUTE


def single(minute: int, state: str = "succeeded", live: bool = False) -> Record:
    return Record(f"{minute:04}", at(minute), at(minute), 1, state, None, live, True)


def stretch(first: int, last: int, reason: str = "coalesced") -> Record:
    return Record(f"{first:04}s", at(first), at(last), last - first + 1, "skipped", reason, False, False)


def minutes(told: Told) -> range:
    return range((told.first - START) // MINUTE, (told.last - START) // MINUTE + 1)


@st.composite
def records_of_a_hundred_minutes(draw: st.DrawFn) -> list[Record]:
    """Some of the minutes have a record of their own, some a common one, some none."""
    cuts = sorted(draw(st.sets(st.integers(0, 99), max_size=20)))
    out: list[Record] = []
    for first, following in pairwise([*cuts, 100]):
        last = draw(st.integers(first, following - 1))
        out.append(single(first) if last == first else stretch(first, last))
    return out


@given(
    records_of_a_hundred_minutes(),
    st.integers(0, 110),
    st.booleans(),
    st.integers(1, 7),
    st.integers(0, 120),
)
def test_each_minute_is_told_once_however_it_is_paged(
    records: list[Record], cursor: int, paused: bool, limit: int, until: int
) -> None:
    records = [r for r in records if r.last < at(cursor)]
    table = Every(START, MINUTE)
    now = at(105) if paused else None
    owed = Owed([Piece(table, START - TICK, at(cursor) - TICK)], table, at(cursor), now)
    before = at(until)
    place, told = Place(START, NOBODY, START - TICK), []
    while True:
        left = [r for r in records if (r.first, r.id) > place[:2] and r.first < before][: limit + 1]
        page = list(islice(tell(left, owed, place, before), limit + 1))
        told += [t for t, _ in page[:limit]]
        if len(page) <= limit:
            break
        place = page[limit - 1][1]
    seen = [minute for t in told for minute in minutes(t)]
    whole = max([until, *(m + 1 for r in records if r.first < before for m in minutes(r.told()))])
    assert seen == list(range(whole))
    assert all(t.how_many == len(minutes(t)) for t in told)
    recorded = {m for r in records for m in minutes(r.told())}
    for t in told:
        for minute in minutes(t):
            if minute in recorded:
                assert t.run_id is not None
            elif minute < cursor:
                assert (t.status, t.reason) == ("missed", "unknown")
            elif paused and minute <= 105:
                assert (t.status, t.reason) == ("skipped", "skipped_paused")
            else:
                assert (t.status, t.reason) == ("planned", "paused" if paused else None)


def test_a_record_inside_a_counted_stretch_makes_no_gap() -> None:
    table = Every(START, MINUTE)
    owed = Owed([Piece(table, START - TICK, None)], table, None)
    records = [stretch(0, 9, "skipped_paused"), single(4)]
    told = [t for t, _ in tell(records, owed, Place(START, NOBODY, START - TICK), at(10))]
    assert [(t.status, t.how_many) for t in told] == [("skipped", 10), ("ran", 1)]


def test_each_schedule_owes_in_its_own_time() -> None:
    often, seldom = Every(START, MINUTE), Every(START, 10 * MINUTE)
    owed = Owed([Piece(often, START - TICK, at(4)), Piece(seldom, at(6), at(29))], seldom, at(30))
    told = [t for t, _ in tell([], owed, Place(START, NOBODY, START - TICK), at(41))]
    assert [(t.status, minutes(t).start, minutes(t).stop - 1, t.how_many) for t in told] == [
        ("missed", 0, 4, 5),
        ("missed", 10, 20, 2),
        ("planned", 30, 30, 1),
        ("planned", 40, 40, 1),
    ]


def test_what_a_record_says() -> None:
    def status(state: str, reason: str | None, live: bool, started: bool) -> str:
        return Record("x", START, START, 1, state, reason, live, started).told().status

    assert status("staged", None, True, False) == status("waiting", None, True, False) == "planned"
    assert status("running", None, True, True) == status("staged", None, True, True) == "running"
    assert status("dead", None, False, True) == status("cancelled", "cancelled", False, True) == "ran"
    assert status("skipped", "skipped_overlap", False, False) == status("cancelled", "cancelled", False, False)
    assert status("skipped", "misfire_expired", False, False) == status("expired", "expired", False, False) == "missed"
    assert status("skipped", "coalesced", False, False) == "coalesced"
