"""Who keeps dead rows from being cleared away: the oldest snapshot of the database, and whose it is.

A queue lives on its dead rows being removed at once. One idle transaction anywhere in the database stops that for all
tables; claims that know where live rows begin bear it for long, but not for ever. Our own sessions cannot do it: their
transactions are limited. Of others we can only tell, in two gauges and in one warning for each that is guilty.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from tocsin.store.db import Database, Sql
from tocsin.telemetry import LONGEST_TX, SEES_SESSIONS, XMIN_AGE, get_logger

SQL = Sql(__file__)
log = get_logger("horizon")
TOO_LONG = 30.0  # seconds; our own transactions may take as long


class Holder(NamedTuple):
    """An open transaction, or a replication slot. `holds`: rows that it might see are kept."""

    kind: str
    pid: int | None
    user: str | None
    application: str
    state: str
    seconds: float
    holds: bool

    def __str__(self) -> str:
        who = f" of {self.user}" if self.user else ""
        pid = f", pid {self.pid}" if self.pid else ""
        return (
            f"{self.kind}{who} ({self.application or 'unnamed'}{pid}, {self.state or 'unknown'}): {self.seconds:.0f} s"
        )


class Horizon:
    """Looks now and then; remembers whom it has spoken of, and since when it has seen what has no time of its own."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._first_seen: dict[tuple[str, str], float] = {}
        self._named: set[tuple[str, int | None, str]] = set()

    async def look(self) -> tuple[list[Holder], bool]:
        """All open transactions, the oldest first; and whether other users' sessions are shown to us at all."""
        rows = await self._db.fetch("engine", SQL["holders"])
        now = time.monotonic()
        timeless = {(row["kind"], row["application"]) for row in rows if row["seconds"] is None}
        self._first_seen = {key: self._first_seen.get(key, now) for key in timeless}
        holders = [
            Holder(*row)._replace(seconds=now - self._first_seen[row["kind"], row["application"]])
            if row["seconds"] is None
            else Holder(*row)
            for row in rows
        ]
        holders.sort(key=lambda holder: -holder.seconds)
        return holders, await self._db.fetchval("engine", SQL["sees_all"])

    async def watch(self) -> None:
        """Set the gauges, and warn once of each that takes too long."""
        holders, sees_all = await self.look()
        LONGEST_TX.set(max((holder.seconds for holder in holders), default=0.0))
        XMIN_AGE.set(max((holder.seconds for holder in holders if holder.holds), default=0.0))
        SEES_SESSIONS.set(sees_all)
        guilty = {(h.kind, h.pid, h.application): h for h in holders if h.seconds > TOO_LONG}
        for key in guilty.keys() - self._named:
            told = guilty[key]
            log.warning(
                "a transaction has been open for long; dead rows pile up behind it"
                if told.holds
                else "a long transaction",
                kind=told.kind,
                pid=told.pid,
                user=told.user,
                application=told.application,
                state=told.state,
                age_seconds=round(told.seconds, 1),
            )
        self._named = set(guilty)
