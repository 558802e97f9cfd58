"""note: keep what an attempt says of itself while it runs: its progress, and the state that its next attempt finds.

Guarded like its end, by the worker and the fence: what a worker says that was given up changes nothing. The state of a
run that is told something in confidence may repeat that. It cannot be masked, for the next attempt needs it as it is;
so it is sealed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from tocsin.errors import ApiProblem, InvalidInput
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.sealing import KEY_GONE, DataKeys
from tocsin.flow.shared.specs import SpecBook
from tocsin.model.ids import parse_id
from tocsin.store.db import Database, Row, Sql, columns
from tocsin.store.vault import context_of, seal, unseal
from tocsin.wire import RunKey, RunNote, encode

SQL = Sql(__file__)
CHECKPOINT_LIMIT = 65_536
_SEALED = re.compile(r"sealed ([0-9]{1,9}) ([A-Za-z0-9+/=]+)", re.ASCII)  # the key's number; no JSON begins like this


class Notebook:
    """Keeps it, and opens what is sealed."""

    def __init__(self, db: Database, specs: SpecBook, keys: DataKeys, parcels: Parcels) -> None:
        self._db, self._specs, self._keys, self._parcels = db, specs, keys, parcels

    async def keep(self, worker_id: str, notes: Sequence[RunNote]) -> list[RunKey]:
        """Keep these; those that were this worker's to say."""
        told = {
            (n.run_id, n.fence): (n.progress, _checkpoint(n, place))
            for place, n in enumerate(notes)
            if parse_id(n.run_id) is not None and 0 <= n.fence < 2**63
        }
        if not told:
            return []
        states = {run_id: state for (run_id, _), (_, state) in told.items() if state is not None}
        sealed = await self._sealed(worker_id, states) if states else {}
        lines = [(*key, progress, sealed.get(key[0], state)) for key, (progress, state) in sorted(told.items())]
        async with self._db.transaction("note", "vital") as connection:
            rows = await connection.fetch(SQL["keep"], worker_id, *columns(lines, 4))
        return [(row["id"], row["fence"]) for row in rows]

    async def _sealed(self, worker_id: str, states: Mapping[str, str]) -> dict[str, str]:
        """Of these states (by run) those that are not to be read in the database, sealed."""
        rows = await self._db.fetch("vital", SQL["whose"], worker_id, list(states))
        known = await self._specs.get((row["tenant_id"], row["job_id"], row["job_version"]) for row in rows)
        out = {}
        for row in rows:
            stored = known.get((row["tenant_id"], row["job_id"], row["job_version"]))
            if stored is not None and stored.confides(row["packed"]) and await self._parcels.understood():
                number, key = await self._keys.current(row["tenant_id"])
                data = seal(key, states[row["id"]].encode(), _context(row))
                out[row["id"]] = f"sealed {number} {base64.b64encode(data).decode()}"
        return out

    async def opened(self, row: Row) -> Any | ApiProblem:
        """The state that a run is handed over with, or why it cannot be read."""
        match = _SEALED.fullmatch(row["checkpoint"])
        if match is None:
            return msgspec.json.decode(row["checkpoint"])
        id_ = row["tenant_id"], int(match[1])
        key = (await self._keys.read([id_]))[id_]
        if isinstance(key, ApiProblem):
            return key
        try:
            return msgspec.json.decode(unseal(key, base64.b64decode(match[2]), _context(row)))
        except ApiProblem as problem:
            return problem
        except ValueError:  # no base64
            return KEY_GONE


def _context(run: Row) -> bytes:
    return context_of("checkpoint", run["tenant_id"], run["id"])


def _checkpoint(note: RunNote, place: int) -> str | None:
    if note.checkpoint is UNSET:
        return None
    text = encode(note.checkpoint).decode()
    if len(text) > CHECKPOINT_LIMIT:
        message = f"holds at most {CHECKPOINT_LIMIT:,} characters of JSON; this has {len(text):,}"
        raise InvalidInput.field(f"notes[{place}].checkpoint", "too_large", message)
    return text
