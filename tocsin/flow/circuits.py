"""circuits: let those that wait for a circuit go again, wave by wave; and show, set, open and close circuits.

What opens a circuit is counted where attempts end (`shared.circuits`); what may not pass is parked by the claim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tocsin.clock import iso
from tocsin.errors import NotFound
from tocsin.flow.shared import audit
from tocsin.flow.shared.circuits import circuit_id, circuit_of, policy_of, policy_text, save
from tocsin.flow.shared.documents import instant
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.transitions import Hint, Key, hints
from tocsin.model.access import Identity
from tocsin.model.circuit import Circuit, CircuitPolicy, closed, opened_by_hand, turned, went
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.telemetry import CIRCUITS_OPEN

SQL = Sql(__file__)
MOST_COUNTED = 100_000
_AT_ONCE = 10  # in one transaction: reports wait for the circuits that it holds
_SOON, _LATER = 0.05, 1.0


class Kept(NamedTuple):
    """What became claimable, the circuits that came into another state (with it), and in how many seconds to look
    again."""

    hints: list[Hint]
    moved: list[tuple[str, str]]
    again: float


async def keep(db: Database) -> Kept:
    """Give every circuit that is due its turn: cool-downs that are over, waves that have ended."""
    seen = await db.fetchrow("engine", SQL["look"])
    CIRCUITS_OPEN.set(seen["open"])
    if seen["wait"] is None or seen["wait"] > 0:
        return Kept([], [], _pause(seen))
    freed: list[Row] = []
    turns: list[tuple[Key, Circuit, Circuit]] = []
    moved: list[tuple[str, str]] = []
    async with db.transaction("circuits") as connection:
        for row in await connection.fetch(SQL["due"], _AT_ONCE):
            key, was = Key(row["tenant_id"], row["id"]), circuit_of(row)
            turn = turned(was, row["under_way"], row["now"])
            woken = []
            if turn.release:
                woken = await connection.fetch(SQL["release"], key.id, turn.release, turn.canaries)
            turns.append((key, was, went(turn, policy_of(row), len(woken), row["now"])))
            freed += woken
            if turn.circuit.state != was.state:
                moved.append((row["name"], turn.circuit.state))
        await save(connection, turns)
    return Kept(hints(freed), moved, _SOON if len(turns) < _AT_ONCE else 0.0)


def _pause(seen: Row) -> float:
    """The end of a canary brings a turn forward: while there are any, the next one may come at any moment."""
    return _SOON if seen["probing"] else min(_LATER, seen["wait"] or _LATER)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def get(db: Database, who: Identity, name: str) -> dict[str, Any]:
    """One circuit's document."""
    async with db.tenant(who.tenant_id, "circuits") as connection:
        row = await connection.fetchrow(SQL["get"], who.tenant_id, MOST_COUNTED, name)
    if row is None:
        raise _unknown()
    return _document(row)


async def list_circuits(
    db: Database, who: Identity, state: str | None, after: str | None, limit: int
) -> list[dict[str, Any]]:
    """A tenant's circuits, by name."""
    async with db.tenant(who.tenant_id, "circuits") as connection:
        rows = await connection.fetch(SQL["list"], who.tenant_id, MOST_COUNTED, state, after, limit)
    return [_document(row) for row in rows]


async def put(db: Database, who: Identity, name: str, policy: CircuitPolicy, wish: Wish | None) -> None:
    """Set when a circuit opens and for how long; makes it if there is none. Raises `Replay` for a known key."""
    async with db.tenant(who.tenant_id, "circuits") as connection:
        await recall(connection, wish)
        text = policy_text(policy)
        was = await connection.fetchval(SQL["put"], who.tenant_id, circuit_id(who.tenant_id, name), name, text)
        await audit.record(connection, audit.entry(who, "circuit.put", f"circuit:{name}").changing(was, text))
        await remember(connection, wish, 200, [])


async def open_by_hand(db: Database, who: Identity, name: str, reason: str, wish: Wish | None) -> None:
    """Let nobody go until it is closed by hand. Raises `Replay` for a known key."""
    async with db.tenant(who.tenant_id, "circuits") as connection:
        row = await _locked(connection, who, name, wish)
        was = circuit_of(row)
        if not was.by_hand:
            await save(connection, [(Key(who.tenant_id, row["id"]), was, opened_by_hand(was, row["now"]))])
        await audit.record(connection, audit.entry(who, "circuit.open", f"circuit:{name}", reason=reason))
        await remember(connection, wish, 200, [])


async def close_by_hand(db: Database, who: Identity, name: str, reason: str, wish: Wish | None) -> None:
    """Let everybody go, those that waited in growing waves. Raises `Replay` for a known key."""
    async with db.tenant(who.tenant_id, "circuits") as connection:
        row = await _locked(connection, who, name, wish)
        was = circuit_of(row)
        if was.state != "closed":
            await save(connection, [(Key(who.tenant_id, row["id"]), was, closed(row["now"]))])
        await audit.record(connection, audit.entry(who, "circuit.close", f"circuit:{name}", reason=reason))
        await remember(connection, wish, 200, [])


async def _locked(connection: Connection, who: Identity, name: str, wish: Wish | None) -> Row:
    await recall(connection, wish)
    row = await connection.fetchrow(SQL["lock_named"], who.tenant_id, name)
    if row is None:
        raise _unknown()
    return row


def _unknown() -> NotFound:
    return NotFound("there is no such circuit")


def _document(row: Row) -> dict[str, Any]:
    circuit, policy = circuit_of(row), policy_of(row)
    failures = sum(past.failed for past in circuit.recent)
    return {
        "name": row["name"],
        "state": circuit.state,
        "since": iso(circuit.since),
        "by_hand": circuit.by_hand,
        "probes_at": instant(circuit.next_at) if circuit.state == "open" else None,
        "waiting": row["waiting"],
        "wave": circuit.wave if circuit.state == "half_open" else None,
        "recent": {"calls": len(circuit.recent), "failures": failures},
        "policy": policy,
        "created_at": iso(row["created_at"]),
    }
