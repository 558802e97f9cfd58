"""preview: what a schedule would do, seen beside the schedules that are there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from tocsin.flow.shared.calendars import named_by
from tocsin.model.access import Identity
from tocsin.model.job import Schedule
from tocsin.model.preview import Preview, minute_of, preview
from tocsin.store.db import Database, Sql

SQL = Sql(__file__)
Run = Callable[..., Awaitable[Preview]]
MOST_LOOKED_AT = 20_000
# So many jobs of a tenant in one minute are worth a word.
MANY = 100


async def preview_schedule(
    db: Database, who: Identity, schedule: Schedule, after: datetime | None, count: int, name: str | None, run: Run
) -> Preview:
    """Return words, instants and warnings for a job that would be created at `after`, or now. Raise the error that its
    creation would raise. `run` computes beside the event loop: a hundred instants of a rare schedule need a search
    through decades."""
    calendar = None
    if schedule.calendar is not None:
        async with db.tenant(who.tenant_id, "preview") as connection:
            known = await named_by(connection, who.tenant_id, schedule)
            calendar = known and known.calendar
    at = after or db.clock.now()
    found = await run(who.tenant_id, preview, schedule, at, count, who.tenant, name, calendar)
    if found.runs:
        sharing = await _sharing(db, who, minute_of(found.runs[0]))
        if sharing >= MANY:
            found.warnings.append(f"{sharing:,} of your jobs share this minute; H in cron, or jitter, spreads them")
    return found


async def _sharing(db: Database, who: Identity, minute: datetime) -> int:
    until = minute + timedelta(minutes=1)
    return await db.fetchval("engine", SQL["sharing"], who.tenant_id, minute, until, MOST_LOOKED_AT)  # type: ignore[no-any-return]
