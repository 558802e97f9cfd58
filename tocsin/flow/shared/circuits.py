"""Circuits as rows: which jobs use which, and what the ends of their attempts make of them.

Lock order: a circuit comes after every run. Whoever holds one takes runs only if nobody else has them (SKIP LOCKED).
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec

from tocsin.clock import EPOCH
from tocsin.flow.shared.transitions import Key
from tocsin.model.circuit import Call, Circuit, CircuitPolicy, Past, counted
from tocsin.model.scalars import decode_scalar
from tocsin.store.db import Connection, Row, Sql, columns
from tocsin.telemetry import CIRCUIT_TRANSITIONS
from tocsin.wire import encode

SQL = Sql(__file__)
DEFAULT = CircuitPolicy()
_NAMESPACE = uuid.UUID("0b1c3e0a-64f1-5d0e-9a53-3f0f8f1f2c70")
_read_policy = msgspec.json.Decoder(CircuitPolicy, dec_hook=decode_scalar).decode
_read_recent = msgspec.json.Decoder(list[tuple[int, bool]]).decode
_MICROSECOND = timedelta(microseconds=1)


class Use(NamedTuple):
    """That a job uses the circuit of a name, or none."""

    tenant_id: int
    job_id: str
    circuit_id: str | None
    name: str | None


def circuit_id(tenant_id: int, name: str) -> str:
    """The number that stands for a tenant's circuit everywhere."""
    return str(uuid.uuid5(_NAMESPACE, f"{tenant_id}/{name}"))


def use_of(job: Key, name: str | None) -> Use:
    """What to write down of a job whose document names this circuit."""
    return Use(*job, None if name is None else circuit_id(job.tenant_id, name), name)


async def use(connection: Connection, uses: Sequence[Use]) -> None:
    """Write down which circuits these jobs use from now on; one that is new is closed. What was made before keeps to
    the circuit that it was made under."""
    if uses:
        await connection.execute(SQL["use"], *columns(uses, 4))


class Called(NamedTuple):
    """The end of one attempt, and the circuit that it counts for."""

    circuit: Key
    call: Call


async def count(connection: Connection, calls: Iterable[Called]) -> None:
    """Let circuits know how attempts ended, in the transaction that ends them and as its last act."""
    told: dict[Key, list[Call]] = defaultdict(list)
    for circuit, call in calls:
        told[circuit].append(call)
    if not told:
        return
    moved = []
    for row in await connection.fetch(SQL["lock"], *columns(sorted(told), 2)):
        key, was = Key(row["tenant_id"], row["id"]), circuit_of(row)
        after = counted(was, policy_of(row), told[key], row["now"])
        if after != was:
            moved.append((key, was, after))
    await save(connection, moved)


def policy_of(row: Row) -> CircuitPolicy:
    """What is set for a circuit."""
    return DEFAULT if row["policy"] is None else _read_policy(row["policy"])


def policy_text(policy: CircuitPolicy) -> str:
    """The form in which it is kept: without what is as by default, so that a server that does not know a newer field
    can read all but those policies that use it."""
    default = msgspec.structs.asdict(DEFAULT)
    return encode(
        {name: value for name, value in msgspec.structs.asdict(policy).items() if value != default[name]}
    ).decode()


def circuit_of(row: Row) -> Circuit:
    """A row as the rules know it."""
    return Circuit(
        row["state"],
        row["since"],
        row["by_hand"],
        tuple(Past(EPOCH + at * _MICROSECOND, failed) for at, failed in _read_recent(row["recent"])),
        *(row[name] for name in ("trips", "wave", "sent", "good", "bad", "next_at")),
    )


async def save(connection: Connection, moved: Sequence[tuple[Key, Circuit, Circuit]]) -> None:
    """Keep what became of circuits (key, before, after) whose rows are locked."""
    if not moved:
        return
    rows = [(*key, *after[:3], _recent_text(after), *after[4:]) for key, _, after in moved]
    await connection.execute(SQL["save"], *columns(rows, 12))
    for _, before, after in moved:
        if before.state != after.state:
            CIRCUIT_TRANSITIONS.labels(after.state).inc()


def _recent_text(circuit: Circuit) -> str:
    return msgspec.json.encode([((at - EPOCH) // _MICROSECOND, failed) for at, failed in circuit.recent]).decode()
