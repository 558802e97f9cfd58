"""Nodes: the jobs that a workflow is made of, kept what its document says in the transaction that stores that.

A node's job stays when the workflow is edited, with a new version if its document is another one; one that the workflow
has no longer is completed, and comes back to life if a later version has it again. Runs under way keep their versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tocsin.errors import Contention
from tocsin.flow.shared import circuits
from tocsin.flow.shared.jobs import columns_of, name_taken, within_scope
from tocsin.flow.shared.lanes import LaneBook, lane_key
from tocsin.flow.shared.sealing import unknown_secrets
from tocsin.flow.shared.transitions import Key
from tocsin.model.access import Identity
from tocsin.model.ids import new_ids
from tocsin.model.job import JobSpec
from tocsin.store.db import Connection, Database, Row, Sql, UniqueViolation, sparse_columns
from tocsin.wire import encode

SQL = Sql(__file__)
_OPEN = ("active", "paused")


class Nodes(NamedTuple):
    """A workflow's jobs by their names in it, and the lane of each."""

    specs: Mapping[str, JobSpec]
    lanes: Mapping[str, int]

    @classmethod
    async def prepare(cls, lanes: LaneBook, who: Identity, specs: Mapping[str, JobSpec]) -> Nodes:
        """Look up what takes no lock; raises what is wrong with one of them."""
        for spec in specs.values():
            within_scope(who, spec, spec.name)  # the new names are known only after the existing jobs have been read
        keys = {node: lane_key(spec) for node, spec in specs.items()}
        known = await lanes.intern(dict.fromkeys(keys.values(), who.tenant_id))
        for node, key in keys.items():
            if refusal := lanes.refusal(f"jobs.{node}.pool", key, who.tenant_id):
                raise refusal
        return cls(specs, {node: known[key] for node, key in keys.items()})


async def workflow_ids(db: Database, tenant_id: int, below: str, most: int) -> list[str]:
    """Return the ids of a tenant's newest workflows below an id. Run as the engine: the caller applies the scope."""
    return [row["id"] for row in await db.fetch("engine", SQL["workflow_ids"], tenant_id, below, most)]


async def store(connection: Connection, who: Identity, workflow_id: str, nodes: Nodes, *, paused: bool = False) -> None:
    """Make the nodes' jobs what the document says. The workflow's own job is locked already."""
    tenant_id = who.tenant_id
    await _refuse_unknown_secrets(connection, tenant_id, nodes.specs)
    clock, *rows = await connection.fetch(SQL["present"], tenant_id, workflow_id)
    present: dict[str, Row] = {row["node"]: row for row in rows}
    texts = {node: encode(spec).decode() for node, spec in nodes.specs.items()}
    new = [node for node in texts if node not in present]
    for node, spec in nodes.specs.items():
        within_scope(who, spec, present[node]["name"] if node in present else None)
    changed = [node for node, text in texts.items() if node in present and _differs(present[node], text)]
    ids = dict(zip(new, new_ids(clock["now"], len(new)), strict=True))
    await _refuse_taken(connection, tenant_id, workflow_id, [(node, nodes.specs[node]) for node in (*new, *changed)])
    try:
        if new:
            batch = [_row(tenant_id, ids[node], node, nodes, texts) for node in new]
            await connection.execute(SQL["add"], *sparse_columns(batch), workflow_id)
        if changed:
            batch = [_row(tenant_id, present[node]["id"], node, nodes, texts) for node in changed]
            await connection.execute(SQL["change"], *sparse_columns(batch))
    except UniqueViolation:
        raise Contention("a name of one of the workflow's jobs was taken at this moment; try again") from None
    gone = [row["id"] for node, row in present.items() if node not in texts and row["state"] in _OPEN]
    if gone:
        await connection.execute(SQL["retire"], tenant_id, gone)
    written = [(ids.get(node) or present[node]["id"], nodes.specs[node]) for node in (*new, *changed)]
    uses = ((Key(tenant_id, id_), spec.circuit_name) for id_, spec in written)
    await circuits.use(connection, [circuits.use_of(*use) for use in uses if use[1] is not None])
    if paused:
        await hold(connection, Key(tenant_id, workflow_id))


async def hold(connection: Connection, workflow: Key) -> None:
    """Let no run of a workflow's nodes start: what began of it goes on when it is resumed."""
    await connection.execute(SQL["hold"], *workflow)


async def unhold(connection: Connection, workflow: Key) -> list[Row]:
    """Let them start again: waiting → ready, the first of those that wait for it. The rest follow by the sweep."""
    await connection.execute(SQL["unhold"], *workflow)
    return await connection.fetch(SQL["waiting_paused"], *workflow)  # type: ignore[no-any-return]


async def cancel(connection: Connection, workflow: Key) -> None:
    """active | paused → cancelled: the nodes' jobs. What runs of them is stopped with the workflow runs."""
    await connection.execute(SQL["unhold"], *workflow)
    await connection.execute(SQL["cancel"], *workflow)


def _differs(row: Row, text: str) -> bool:
    return row["state"] not in _OPEN or row["spec"] != text


def _row(tenant_id: int, id_: str, node: str, nodes: Nodes, texts: Mapping[str, str]) -> tuple[object, ...]:
    spec = nodes.specs[node]
    schedule = encode(spec.schedule).decode()
    return (
        *(tenant_id, id_, node, spec.name, texts[node], nodes.lanes[node]),
        *columns_of(spec, tenant_id),
        schedule,
    )


async def _refuse_unknown_secrets(connection: Connection, tenant_id: int, specs: Mapping[str, JobSpec]) -> None:
    named = {place: (tenant_id, spec.secrets) for place, spec in enumerate(specs.values()) if spec.secrets}
    if not named:
        return
    for place, problem in (await unknown_secrets(connection, named)).items():
        node = list(specs)[place]
        problem.errors = [each | {"path": f"jobs.{node}.{each['path']}"} for each in problem.errors or ()]
        raise problem


async def _refuse_taken(
    connection: Connection, tenant_id: int, workflow_id: str, specs: Sequence[tuple[str, JobSpec]]
) -> None:
    """Refuse nodes whose job would have a name that an open job has already."""
    names = [spec.name for _, spec in specs]
    taken = await connection.fetchval(SQL["taken"], tenant_id, workflow_id, names) if names else []
    for node, spec in specs:
        if spec.name in taken:
            problem = name_taken(spec)
            problem.errors = [{"path": f"jobs.{node}", "code": problem.code, "message": problem.detail}]
            raise problem
