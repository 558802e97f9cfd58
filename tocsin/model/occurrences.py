"""What a job owed, instant by instant, and what became of it: its records, and what its timetables say of the rest.

Nothing is left out in silence. An instant that was owed and of which nobody has a record is told as missed for an
`unknown` reason: that would be a fault of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from tocsin.model.misfire import missed_until
from tocsin.model.timetable import TICK, Timetable, Within

Status = Literal["ran", "running", "planned", "skipped", "coalesced", "missed"]


class Told(NamedTuple):
    """An instant or, counted, a stretch of them; `run_id` and `state` of the run or the record behind it."""

    status: Status
    first: datetime
    last: datetime
    how_many: int = 1
    reason: str | None = None
    run_id: str | None = None
    state: str | None = None


class Record(NamedTuple):
    """A live run of a schedule, or a final row of its history."""

    id: str
    first: datetime
    last: datetime
    how_many: int
    state: str
    reason: str | None
    live: bool
    started: bool  # whether it had an attempt

    def told(self) -> Told:
        return Told(self._status(), self.first, self.last, self.how_many, self.reason, self.id, self.state)

    def _status(self) -> Status:
        if self.live:
            return "running" if self.started else "planned"
        if self.started:
            return "ran"
        if self.reason == "coalesced":
            return "coalesced"
        return "missed" if self.reason in ("misfire_expired", "expired") else "skipped"


class Place(NamedTuple):
    """How far it has been told: behind which record, and up to which instant."""

    first: datetime
    id: str
    seen: datetime


class Piece(NamedTuple):
    """A timetable, and when it was the job's: after one instant, up to and including another."""

    table: Timetable
    after: datetime
    until: datetime | None


class Owed(NamedTuple):
    """What a job owed and owes. Of what lies before `cursor` there are records; from it on `coming` is planned, but
    for what a pause has swallowed up to `paused_until`."""

    past: Sequence[Piece]
    coming: Timetable
    cursor: datetime | None
    paused_until: datetime | None = None

    def between(self, after: datetime, before: datetime) -> Iterator[Told]:
        """All that is owed strictly between the two, for which there is no record."""
        for table, start, until in self.past:
            within = Within(table, start + TICK, until)
            if count := within.count(after, before):
                first = within.next_after(after)
                last = first and within.last_before(before, first)
                if first is not None and last is not None:
                    yield Told("missed", first, last, count, "unknown")
        if self.cursor is not None and before > self.cursor:
            yield from self._planned(max(after, self.cursor - TICK), before)

    def _planned(self, after: datetime, before: datetime) -> Iterator[Told]:
        following = self.coming.next_after(after)
        if self.paused_until is not None and following is not None and following <= self.paused_until:
            for m in missed_until(self.coming, following, min(self.paused_until, before - TICK), "skipped_paused"):
                yield Told("skipped", m.first, m.last, m.count, m.reason)
            following = self.coming.next_after(self.paused_until)
        while following is not None and following < before:
            yield Told("planned", following, following, reason=None if self.paused_until is None else "paused")
            following = self.coming.next_after(following)


def tell(records: Iterable[Record], owed: Owed, place: Place, before: datetime) -> Iterator[tuple[Told, Place]]:
    """What is owed from a place on and before an instant, in order, each with the place behind it."""
    for record in records:
        for told in owed.between(place.seen, record.first):
            place = place._replace(seen=told.last)
            yield told, place
        place = Place(record.first, record.id, max(place.seen, record.last))
        yield record.told(), place
    for told in owed.between(place.seen, before):
        place = place._replace(seen=told.last)
        yield told, place
