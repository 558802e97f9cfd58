"""The calendars that schedules name: read many at once, kept while they stay the same; and who goes by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from tocsin.errors import Contention, InvalidInput
from tocsin.flow.shared.memory import Memory
from tocsin.model.calendars import Calendar
from tocsin.model.job import Schedule
from tocsin.store.db import Connection, Sql, columns

SQL = Sql(__file__)
_decode = msgspec.json.Decoder(Calendar).decode


class CalendarKey(NamedTuple):
    """A tenant's calendar."""

    tenant_id: int
    name: str


class Known(NamedTuple):
    """A calendar, and which version of it."""

    version: int
    calendar: Calendar


class Use(NamedTuple):
    """That a job goes by a calendar, and by which version its cursor was set."""

    tenant_id: int
    job_id: str
    name: str
    version: int


# By what they hold, not by their number: two databases of one process may have the same name and version.
_kept: Memory[CalendarKey, tuple[str, Calendar]] = Memory(64 * 1024 * 1024)
_DECODED = 8  # ratio of the memory of a decoded calendar to the bytes of its document


def key_of(tenant_id: int, schedule: Schedule | None) -> CalendarKey | None:
    """The calendar that a schedule names, if it names one."""
    return None if schedule is None or schedule.calendar is None else CalendarKey(tenant_id, schedule.calendar)


async def read(connection: Connection, keys: Iterable[CalendarKey | None]) -> dict[CalendarKey, Known]:
    """The calendars of these names that there are, in one query, or none if there is nothing to ask for."""
    wanted = {key for key in keys if key is not None}
    if not wanted:
        return {}
    # A copy: other tasks may change the cache.
    kept = {key: known for key in wanted if (known := _kept.get(key)) is not None}
    asked = [(*key, kept[key][0] if key in kept else None) for key in wanted]
    found: dict[CalendarKey, Known] = {}
    for row in await connection.fetch(SQL["read"], *columns(asked, 3)):
        key = CalendarKey(row["tenant_id"], row["name"])
        if row["document"] is not None:
            kept[key] = row["digest"], _decode(row["document"])
            _kept.put(key, kept[key], _DECODED * len(row["document"]))
        found[key] = Known(row["version"], kept[key][1])
    return found


async def named_by(connection: Connection, tenant_id: int, schedule: Schedule | None) -> Known | None:
    """The calendar that a schedule names; raises if there is none of that name."""
    key = key_of(tenant_id, schedule)
    found = await read(connection, [key])
    if key is not None and key not in found:
        raise unknown(key.name)
    return None if key is None else found[key]


def unknown(name: str) -> InvalidInput:
    """What a job is told that names a calendar nobody made."""
    return InvalidInput.field("schedule.calendar", "unknown_calendar", f"there is no calendar {name!r}")


async def use(connection: Connection, uses: Sequence[Use]) -> None:
    """Write down that these jobs go by these calendars, which must be there."""
    if uses and len(await connection.fetch(SQL["use"], *columns(uses, 4))) < len(uses):
        raise Contention("a calendar was deleted at the same moment; try again")


async def leave(connection: Connection, tenant_id: int, job_id: str) -> None:
    """Write down that a job goes by no calendar."""
    await connection.execute(SQL["leave"], tenant_id, job_id)
