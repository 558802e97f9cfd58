"""Joins: what the end of a run does to those that wait for it, decided in the transaction that ends it.

Each run that waits carries how many are still to end (`pending_parents`) and what those that have ended did to it
(`doomed`). Runs of a workflow are all made when it begins and know whom they feed; a job that depends on other jobs
gets its run when the first of its parents ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Family, Hint, Key, NewRun, hints, stage
from tocsin.model.graph import FULFILLED, UPSTREAM_FAILED, doom, skip_reason
from tocsin.model.ids import new_ids
from tocsin.model.workflow import BadMap, Map
from tocsin.store.db import Connection, Row, Sql, columns
from tocsin.wire import encode

SQL = Sql(__file__, SHARED)
WANTS = {"s": "success", "f": "failure", "c": "completion"}
LETTERS = {on: letter for letter, on in WANTS.items()}
HEAD, MAPPED = "h", "m"  # the workflow run that a node belongs to; the node that a mapped run is one of


class Mapping(msgspec.Struct, frozen=True):
    """A node's `map` in one workflow run: the run whose result it is about."""

    run_id: str
    map: Map


class Ended(msgspec.Struct, frozen=True):
    """A run that has ended and for which others may wait."""

    tenant_id: int
    id: str
    job_id: str
    state: str
    reason: str | None
    feeds: list[str] | None
    feeds_on: str | None
    joins: bool
    trigger: str
    join_key: str | None
    chain: str | None
    logical_at: datetime

    def does_to(self, letter: str) -> int:
        """What its end does to a run that waits for it so."""
        if letter in WANTS:
            return doom(WANTS[letter], self.state, self.reason)
        well = self.state == "succeeded" or (letter == HEAD and self.reason == "not_needed")
        return FULFILLED if well else UPSTREAM_FAILED


class Settled(NamedTuple):
    """Where runs became claimable, and whether a workflow run has come to its end."""

    hints: list[Hint]
    heads: bool = False


NOBODY = Settled([])  # waited


class _Told(NamedTuple):
    """What one run that waits is told: how many have ended, what that does to it, and who they were if its row does
    not know it."""

    ended: int
    doomed: int
    parents: tuple[str, ...]


async def settle(connection: Connection, rows: Iterable[Row]) -> Settled:
    """Decide about all that wait for these runs, and for those that end by it, and so on down."""
    wave = _families(rows)
    woken: list[Row] = []
    heads = False
    while wave:
        told = _fed(wave)
        if joins := [ended for ended in wave if ended.joins]:
            told |= await _dependents(connection, joins)
        if not told:
            break
        batch = [(*key, t.ended, t.doomed, _array(t.parents)) for key, t in sorted(told.items())]
        decided = await connection.fetch(SQL["settle"], *columns(batch, 5))
        heads |= any(row["what"] == "head" for row in decided)
        woken += [row for row in decided if row["what"] == "ready"]
        ends = [(row["tenant_id"], row["id"], *_end(row)) for row in decided if row["what"] in ("doomed", "mapped")]
        for row in decided:
            if row["what"] == "map":
                made, end = await _map(connection, row)
                woken += made
                ends += [(row["tenant_id"], row["id"], *end)] if end else []
        wave = _families(await connection.fetch(SQL["conclude"], *columns(sorted(ends), 4))) if ends else []
    return Settled(hints(woken), heads)


def _families(rows: Iterable[Row]) -> list[Ended]:
    found = [msgspec.json.decode(row["family"], type=Ended) for row in rows if row["family"] is not None]
    return [msgspec.structs.replace(e, logical_at=e.logical_at.replace(tzinfo=UTC)) for e in found]


def _end(row: Row) -> tuple[str, str | None]:
    """The state and the reason of a run that ends because those it waited for have."""
    if row["what"] == "doomed":
        return "skipped", skip_reason(row["doomed"])
    return ("succeeded", "mapped") if row["doomed"] == FULFILLED else ("dead", "map_failed")


def _fed(wave: Iterable[Ended]) -> dict[Key, _Told]:
    told: dict[Key, _Told] = {}
    for ended in wave:
        for child, letter in zip(ended.feeds or (), ended.feeds_on or "", strict=True):
            _tell(told, Key(ended.tenant_id, child), ended.does_to(letter), ())
    return told


def _tell(told: dict[Key, _Told], child: Key, doomed: int, parents: tuple[str, ...]) -> None:
    known = told.get(child, _Told(0, 0, ()))
    told[child] = _Told(known.ended + 1, max(known.doomed, doomed), known.parents + parents)


def _array(ids: Sequence[str]) -> str | None:
    """As PostgreSQL writes an array."""
    return f"{{{','.join(ids)}}}" if ids else None


# ── one run for each element ─────────────────────────────────────────────────────────────────────────────────────


async def _map(connection: Connection, row: Row) -> tuple[list[Row], tuple[str, str] | None]:
    """Make the runs of a mapped node; or say how it ends without any."""
    about = msgspec.json.decode(row["map"], type=Mapping)
    result = await connection.fetchval(SQL["result"], row["tenant_id"], about.run_id)
    try:
        elements = about.map.args_for(msgspec.json.decode(result or "null"))
    except BadMap:
        return [], ("dead", "map_failed")
    if not elements:
        return [], ("succeeded", "mapped")
    family = Family(
        logical_at=row["logical_at"],
        workflow_run_id=row["workflow_run_id"],
        feeds=_array([row["id"]]),
        feeds_on=MAPPED,
        parents=row["parents"],
    )
    now = await connection.fetchval(SQL["mapped"], row["tenant_id"], row["id"], len(elements))
    runs = [
        NewRun(row["tenant_id"], id_, row["job_id"], "dependency", row["scheduled_for"], row["priority"], args, None,
               family=family)
        for id_, args in zip(new_ids(now, len(elements)), (encode(each).decode() for each in elements), strict=True)
    ]  # fmt: skip
    return await stage(connection, runs), None


# ── jobs that depend on jobs ─────────────────────────────────────────────────────────────────────────────────────


async def hold_graph(connection: Connection, tenant_id: int) -> None:
    """Be alone with the tenant's graph until the end of the transaction: take it before any job."""
    await connection.execute(SQL["hold"], tenant_id)


class _Chain(NamedTuple):
    """Which runs of different jobs belong together, and the job whose run by hand began it (None: a schedule did)."""

    key: str
    root: str | None


def _chain(ended: Ended) -> _Chain:
    if ended.join_key is not None:
        return _Chain(ended.join_key, ended.chain)
    if ended.trigger == "schedule":
        # Parents of the same schedule are due at the same instants: those belong together.
        text = ended.logical_at.astimezone(UTC).isoformat(timespec="microseconds")
        return _Chain(_uuid(f"{ended.tenant_id}:{text}"), None)
    return _Chain(ended.id, ended.job_id)


def _uuid(text: str) -> str:
    h = hashlib.sha256(text.encode()).hexdigest()
    return f"{h[:8]}-{h[8:12]}-8{h[13:16]}-8{h[17:20]}-{h[20:32]}"


async def _dependents(connection: Connection, wave: Sequence[Ended]) -> dict[Key, _Told]:
    """What the runs of jobs that depend on these are told; those that there are not yet are made, waiting."""
    # A statement of its own: what is read after it is what the last change of the graph left. It comes after locks of
    # jobs and runs that such a change may want; that circle is noticed by PostgreSQL, and whoever it stops tries again.
    await connection.execute(SQL["share"], sorted({ended.tenant_id for ended in wave}))
    chains = [_chain(ended) for ended in wave]
    asked = [(ended.tenant_id, ended.job_id, chain.root) for ended, chain in zip(wave, chains, strict=True)]
    edges = await connection.fetch(SQL["dependents"], *columns(asked, 3))
    if not edges:
        return {}
    wanted: dict[tuple[str, str], NewRun] = {}
    now = edges[0]["now"]
    for edge, id_ in zip(edges, new_ids(now, len(edges)), strict=True):
        ended, chain = wave[edge["n"] - 1], chains[edge["n"] - 1]
        family = Family(ended.logical_at, pending=edge["parents"], join_key=chain.key, chain=chain.root)
        new = NewRun(ended.tenant_id, id_, edge["child_id"], "dependency", ended.logical_at, family=family)
        wanted.setdefault((edge["child_id"], chain.key), new)
    # In the order of their keys: two commits that make the same ones wait for each other, never in a circle.
    await stage(connection, [wanted[key] for key in sorted(wanted)])
    places = list(wanted)
    rows = await connection.fetch(SQL["joined"], *columns(places, 2))
    found = {places[row["n"] - 1]: Key(row["tenant_id"], row["id"]) for row in rows}
    told: dict[Key, _Told] = {}
    for edge in edges:
        ended, chain = wave[edge["n"] - 1], chains[edge["n"] - 1]
        child = found.get((edge["child_id"], chain.key))
        if child is not None:
            _tell(told, child, ended.does_to(edge["wants"]), (ended.id,))
    return told
