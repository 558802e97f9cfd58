"""note: keep what an attempt says of itself while it runs: its progress, and the state that its next attempt finds.

Guarded like its end, by the worker and the fence: what a worker says that was given up changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from tocsin.errors import InvalidInput
from tocsin.model.ids import parse_id
from tocsin.store.db import Database, Sql, columns
from tocsin.wire import RunKey, RunNote, encode

SQL = Sql(__file__)
CHECKPOINT_LIMIT = 65_536


async def note(db: Database, worker_id: str, notes: Sequence[RunNote]) -> list[RunKey]:
    """Keep these; those that were this worker's to say."""
    told = {
        (n.run_id, n.fence): (n.run_id, n.fence, n.progress, _checkpoint(n, place))
        for place, n in enumerate(notes)
        if parse_id(n.run_id) is not None and 0 <= n.fence < 2**63
    }
    if not told:
        return []
    async with db.transaction("note", "vital") as connection:
        rows = await connection.fetch(SQL["keep"], worker_id, *columns(sorted(told.values()), 4))
    return [(row["id"], row["fence"]) for row in rows]


def _checkpoint(note: RunNote, place: int) -> str | None:
    if note.checkpoint is UNSET:
        return None
    text = encode(note.checkpoint).decode()
    if len(text) > CHECKPOINT_LIMIT:
        message = f"holds at most {CHECKPOINT_LIMIT:,} characters of JSON; this has {len(text):,}"
        raise InvalidInput.field(f"notes[{place}].checkpoint", "too_large", message)
    return text
