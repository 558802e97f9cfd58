"""Joins: what the end of a run does to those that wait for it, decided in the transaction that ends it.

Each run that waits carries how many are still to end (`pending_parents`) and what those that have ended did to it
(`doomed`). Runs of a workflow are all made when it begins and know whom they feed; a job that depends on other jobs
gets its run when the first of its parents ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeAlias

import msgspec

from tocsin.flow.shared.jobs import key_of_run
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Family, Hint, Key, NewRun, hints, stage
from tocsin.model.graph import FULFILLED, UPSTREAM_FAILED, doom, skip_reason
from tocsin.model.ids import lowest_id, new_ids
from tocsin.model.packed import Packed, has_references, size_of
from tocsin.model.workflow import BadMap, Map
from tocsin.store.db import Connection, Row, Sql, columns
from tocsin.wire import encode

SQL = Sql(__file__, SHARED)
WANTS = {"s": "success", "f": "failure", "c": "completion"}
LETTERS = {on: letter for letter, on in WANTS.items()}
MOST_BYTES = 64 * 2**20  # of a result that is mapped over
HEAD, ELEMENT = "h", "m"  # the workflow run that a node belongs to; the node that a mapped run is one of


class Mapped(msgspec.Struct, frozen=True):
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
    """Where runs became claimable, whether a workflow run has come to its end, and whether a node is to be unfolded."""

    hints: list[Hint]
    heads: bool = False
    folded: bool = False


class Elements(NamedTuple):
    """The arguments of a mapped node's runs (JSON); and by their places, those of them that lie in object storage."""

    args: list[str]
    packed: Mapping[int, Packed]


AtHand: TypeAlias = Mapping[tuple[str, str], Elements | BadMap]  # by a node's run and its `map`: that may be changed


NOBODY = Settled([])  # waited
_NOTHING: AtHand = {}
_ENDS = ("doomed", "mapped", "stopped")  # what is decided about runs that end by it
# A run by hand has its id before its instant: by the moment that its call waits for a commit, or by as much as it was
# put off when it was asked for.
_ASKED_BEFORE = timedelta(days=1)


class _Told(NamedTuple):
    """What one run that waits is told: how many have ended, what that does to it, and who they were if its row does
    not know it."""

    ended: int
    doomed: int
    parents: tuple[str, ...]
    is_head: bool = False


async def settle(connection: Connection, rows: Iterable[Row]) -> Settled:
    """Decide about all that wait for these runs, and for those that end by it, and so on down."""
    wave = _families(rows)
    return await _settle(connection, await _told_by(connection, wave, is_first=True)) if wave else NOBODY


async def decide(connection: Connection, runs: Iterable[Key], at_hand: AtHand = _NOTHING) -> Settled:
    """Decide about runs that were made to wait for one, and need not: as if it had ended well."""
    return await _settle(connection, {run: _Told(1, FULFILLED, ()) for run in runs}, at_hand)


async def _told_by(connection: Connection, wave: Sequence[Ended], is_first: bool = False) -> dict[Key, _Told]:
    told = _fed(wave)
    if joins := [ended for ended in wave if ended.joins]:
        told |= await _dependents(connection, joins, is_first)
    return told


async def _settle(connection: Connection, told: dict[Key, _Told], at_hand: AtHand = _NOTHING) -> Settled:
    """Wave by wave. Whoever goes down a graph takes all that it may come to in the order of ids, in which children come
    after their parents, and the heads after all else: so does whoever takes the whole of a graph, and they never wait
    for each other in a circle. Only where another parent's end makes it come further meanwhile than it could see may
    PostgreSQL notice one, and whoever it stops tries again."""
    woken: list[Row] = []
    heads: dict[Key, _Told] = {}
    is_held = folded = False
    while told:
        for head in [key for key, each in told.items() if each.is_head]:
            _add(heads, head, told.pop(head))
        if len(told) > 1 and not is_held:
            below = sorted((*key, each.doomed) for key, each in told.items())
            await connection.fetch(SQL["hold_below"], *columns(below, 3))
            is_held = True
        decided = await _decided(connection, told)
        woken += [row for row in decided if row["what"] == "ready"]
        ends = [(row["tenant_id"], row["id"], *_end(row)) for row in decided if row["what"] in _ENDS]
        for row in decided:
            if row["what"] == "map":
                made, end = await _map(connection, row, at_hand.get((row["id"], row["map"])))
                woken += made
                ends += [(row["tenant_id"], row["id"], *end)] if end else []
                folded = folded or not (made or end)
        ended = await connection.fetch(SQL["conclude"], *columns(sorted(ends), 5)) if ends else []
        told = await _told_by(connection, _families(ended))
    return Settled(hints(woken), any(row["what"] == "head" for row in await _decided(connection, heads)), folded)


async def _decided(connection: Connection, told: dict[Key, _Told]) -> list[Row]:
    """What is decided about runs by what they are told."""
    batch = [(*key, each.ended, each.doomed, array(each.parents)) for key, each in sorted(told.items())]
    return await connection.fetch(SQL["settle"], *columns(batch, 5)) if batch else []


def _families(rows: Iterable[Row]) -> list[Ended]:
    found = [msgspec.json.decode(row["family"], type=Ended) for row in rows if row["family"] is not None]
    return [msgspec.structs.replace(e, logical_at=e.logical_at.replace(tzinfo=UTC)) for e in found]


_End: TypeAlias = tuple[str, str | None, str | None]  # a state, the reason, and in words what went wrong


def _end(row: Row) -> _End:
    """How a run ends because those it waited for have."""
    if row["what"] == "doomed":
        return "skipped", skip_reason(row["doomed"]), None
    if row["what"] == "stopped":
        return "cancelled", "cancelled", None
    return ("succeeded", "mapped", None) if row["doomed"] == FULFILLED else ("dead", "map_failed", None)


def _fed(wave: Iterable[Ended]) -> dict[Key, _Told]:
    told: dict[Key, _Told] = {}
    for ended in wave:
        for child, letter in zip(ended.feeds or (), ended.feeds_on or "", strict=True):
            _add(told, Key(ended.tenant_id, child), _Told(1, ended.does_to(letter), (), letter == HEAD))
    return told


def _add(told: dict[Key, _Told], run: Key, more: _Told) -> None:
    known = told.get(run, _Told(0, 0, ()))
    told[run] = _Told(
        known.ended + more.ended, max(known.doomed, more.doomed), known.parents + more.parents, more.is_head
    )


def array(ids: Sequence[str]) -> str | None:
    """As PostgreSQL writes an array."""
    return f"{{{','.join(ids)}}}" if ids else None


# ── one run for each element ─────────────────────────────────────────────────────────────────────────────────────


async def _map(connection: Connection, row: Row, elements: Elements | BadMap | None) -> tuple[list[Row], _End | None]:
    """Make the runs of a mapped node; or say how it ends without any. Neither: the list that it is mapped over lies in
    object storage, for which nobody waits who holds others up; it is put off until somebody has fetched it."""
    if elements is None:
        elements = await _elements(connection, row)
    if elements is None:
        await connection.execute(SQL["put_off"], row["tenant_id"], row["id"])
        return [], None
    if isinstance(elements, BadMap):
        return [], ("dead", "map_failed", str(elements))
    if not elements.args:
        return [], ("succeeded", "mapped", None)
    family = Family(
        logical_at=row["logical_at"],
        workflow_run_id=row["workflow_run_id"],
        feeds=array([row["id"]]),
        feeds_on=ELEMENT,
        parents=row["parents"],
    )
    said = await connection.fetchrow(SQL["mapped"], row["tenant_id"], row["id"], len(elements.args))
    texts = list(elements.args)
    keys = [key_of_run(row["tenant_id"], said["key_template"], args) for args in texts]
    for place, packed in elements.packed.items():
        texts[place] = msgspec.structs.replace(packed, key_id=keys[place]).text
    of_job = row["job_id"], "dependency", row["scheduled_for"], row["priority"]
    runs = [
        NewRun(row["tenant_id"], id_, *of_job, args, row["id"], key_id=key, family=family)
        for id_, args, key in zip(new_ids(said["now"], len(texts)), texts, keys, strict=True)
    ]
    made = await stage(connection, runs)
    # The workflow may have been edited since this run of it began.
    return await connection.fetch(SQL["as_mapped"], row["tenant_id"], row["id"], [run["id"] for run in made]), None


async def _elements(connection: Connection, row: Row) -> Elements | BadMap | None:
    """What a node is mapped over, or why that cannot be; None if it is to be fetched."""
    about = msgspec.json.decode(row["map"], type=Mapped)
    found = await connection.fetchrow(SQL["result"], row["tenant_id"], about.run_id, MOST_BYTES)
    try:
        text = listed(found, about)
    except BadMap as why:
        return why
    return None if has_references(text) else elements_of(text, about)


def listed(found: Row | None, about: Mapped) -> str:
    """What the run ended with that a node is mapped over, as its row (`result`) has it; raises `BadMap`."""
    text = "null" if found is None or found["result"] is None else found["result"]
    if found is not None and max(found["size"], size_of(text)) > MOST_BYTES:
        raise BadMap(f"the result of {about.map.parent} has more than {MOST_BYTES // 2**20} MiB")
    return str(text)


def elements_of(result: str, about: Mapped) -> Elements | BadMap:
    """The arguments of a mapped node's runs, made of the whole result."""
    try:
        return Elements([encode(each).decode() for each in about.map.args_for(msgspec.json.decode(result))], {})
    except BadMap as why:
        return why
    except RecursionError:
        return BadMap(f"the result of {about.map.parent} is nested too deeply")


# ── jobs that depend on jobs ─────────────────────────────────────────────────────────────────────────────────────


async def see_all(connection: Connection) -> None:
    """From here on see all jobs of the tenant: a key may be kept to some of them, and what its call means for others
    must be known, and be told them, all the same."""
    await connection.execute(SQL["see_all"])


async def hold_graph(connection: Connection, tenant_id: int) -> None:
    """Be alone with the tenant's graph until the end of the transaction: take it before any job."""
    await connection.execute(SQL["hold"], tenant_id)


async def share_graph(connection: Connection, tenant_id: int) -> None:
    """Let the tenant's graph be as it is until the end of the transaction. Whoever will `settle` and can take it before
    any job does, for then nobody who changes the graph meanwhile waits for it in a circle."""
    await connection.execute(SQL["share_one"], tenant_id)


async def hold_chain(connection: Connection, run: Key) -> None:
    """Be alone with the chain that a run waits in. Whoever cancels it takes this before the run, as those do who end
    others of the chain."""
    await connection.execute(SQL["hold_chain"], *run)


async def _share(connection: Connection, tenants: Iterable[int], chains: Iterable[str]) -> None:
    """Let the graphs of these tenants be as they are, and be alone with these chains: their runs are made and decided
    about by one after the other, in whatever order the jobs come.

    A statement of its own: what is read after it is what the last one left. Where it comes after locks of jobs that a
    change of the graph wants, PostgreSQL notices the circle, and whoever it stops tries again."""
    await connection.execute(SQL["share"], sorted(set(tenants)), list(chains))


class _Chain(NamedTuple):
    """Which runs of different jobs belong together, and the job whose run by hand began it (None: a schedule did)."""

    key: str
    root: str | None


def _chain(ended: Ended) -> _Chain:
    if ended.join_key is not None:
        return _Chain(ended.join_key, ended.chain)
    if ended.trigger == "schedule":
        # Parents of the same schedule are due at the same instants: those belong together.
        return _Chain(_instant_key(ended.tenant_id, ended.logical_at), None)
    return _Chain(ended.id, ended.job_id)


def _instant_key(tenant_id: int, instant: datetime) -> str:
    """Of the chain that begins with an instant."""
    text = f"{tenant_id}:{instant.astimezone(UTC).isoformat(timespec='microseconds')}"
    h = hashlib.sha256(text.encode()).hexdigest()
    return f"{h[:8]}-{h[8:12]}-8{h[13:16]}-8{h[17:20]}-{h[20:32]}"


class _Edge(NamedTuple):
    """A job that depends on one of which a run has ended."""

    child_id: str
    wants: str
    parents: int
    priority: int | None
    ended: Ended
    chain: _Chain


async def _dependents(connection: Connection, wave: Sequence[Ended], is_first: bool) -> dict[Key, _Told]:
    """What the runs of jobs that depend on these are told; those that there are not yet are made, waiting."""
    chains = [_chain(ended) for ended in wave]
    # Nobody else is in a chain yet that one of these begins; and those of a later wave are in the chains of the first.
    others = {chain.key for ended, chain in zip(wave, chains, strict=True) if is_first and chain.key != ended.id}
    await _share(connection, (ended.tenant_id for ended in wave), others)
    asked = [(ended.tenant_id, ended.job_id, chain.root, chain.key) for ended, chain in zip(wave, chains, strict=True)]
    rows = await connection.fetch(SQL["dependents"], *columns(asked, 4))
    if not rows:
        return {}
    edges = [
        _Edge(r["child_id"], r["wants"], r["parents"], r["priority"], wave[r["n"] - 1], chains[r["n"] - 1])
        for r in rows
    ]
    now = rows[0]["now"]
    told: dict[Key, _Told] = {}
    whole = [edge for edge, row in zip(edges, rows, strict=True) if row["whole"]]
    found = await _joined(connection, whole, now)
    for edge in whole:
        child = found.get((edge.child_id, edge.chain.key))
        if child is not None:
            _add(told, child, _Told(1, edge.ended.does_to(edge.wants), (edge.ended.id,)))
    in_part = [edge for edge, row in zip(edges, rows, strict=True) if not row["whole"]]
    return told | await _meet(connection, in_part, now) if in_part else told


async def _joined(connection: Connection, edges: Sequence[_Edge], now: datetime) -> dict[tuple[str, str], Key]:
    """The runs of these jobs in these chains, by job and chain; those that there are not yet are made."""
    wanted: dict[tuple[str, str], NewRun] = {}
    for edge, id_ in zip(edges, new_ids(now, len(edges)), strict=True):
        ended, chain = edge.ended, edge.chain
        family = Family(ended.logical_at, pending=edge.parents, join_key=chain.key, chain=chain.root)
        new = NewRun(ended.tenant_id, id_, edge.child_id, "dependency", ended.logical_at, edge.priority, family=family)
        wanted.setdefault((edge.child_id, chain.key), new)
    # In the order of their keys: two commits that make the same ones wait for each other, never in a circle.
    await stage(connection, [wanted[key] for key in sorted(wanted)])
    places = list(wanted)
    rows = await connection.fetch(SQL["joined"], *columns(places, 2))
    return {places[row["n"] - 1]: Key(row["tenant_id"], row["id"]) for row in rows}


# ── what is decided by how parents ended earlier ─────────────────────────────────────────────────────────────────


class _Place(NamedTuple):
    """A job, an instant that a run of it stands for, and the chain that this belongs to."""

    tenant_id: int
    child_id: str
    instant: datetime
    key: str


async def _meet(connection: Connection, edges: Sequence[_Edge], now: datetime) -> dict[Key, _Told]:
    """Jobs with several parents, of which a chain that began by hand need not reach all: a run was tried again, say.

    Such a job is decided about when each of its parents has ended for that instant, whenever that was: so whoever tries
    those again that failed, one after the other, gets its run with the last. One that still waits in the chain of its
    schedule is not made a second time: it goes by how its parents ended the last time."""
    places = {_Place(e.ended.tenant_id, e.child_id, e.ended.logical_at, e.chain.key): e for e in edges}
    order = sorted(places)
    await connection.execute(SQL["meet"], [p.child_id for p in order], [p.instant for p in order])
    first = [(place.child_id, _instant_key(place.tenant_id, place.instant)) for place in order]
    waiting = {
        order[row["n"] - 1]: Key(row["tenant_id"], row["id"])
        for row in await connection.fetch(SQL["lock_joined"], *columns(first, 2))
    }
    ends = await _ends(connection, order)
    redeemed = {key: max(end.doomed for end in ends[place] if end.run_id is not None) for place, key in waiting.items()}
    if redeemed:
        await connection.execute(SQL["redeem"], *columns([(*key, to) for key, to in sorted(redeemed.items())], 3))
    met = [p for p in order if p not in waiting and all(end.run_id is not None and not end.coming for end in ends[p])]
    found = await _joined(connection, [places[place] for place in met], now) if met else {}
    told: dict[Key, _Told] = {}
    for place in met:
        child = found.get((place.child_id, place.key))
        if child is not None:
            parents = tuple(end.run_id for end in ends[place] if end.run_id is not None)
            told[child] = _Told(len(parents), max(end.doomed for end in ends[place]), parents)
    return told


class _ParentEnd(NamedTuple):
    """What the end of a parent for an instant does to its child; no run: there was none, which has the same effect as
    one that was skipped. `coming`: another run of it is still to end in the chain."""

    run_id: str | None
    doomed: int
    coming: bool


async def _ends(connection: Connection, places: Sequence[_Place]) -> dict[_Place, list[_ParentEnd]]:
    asked = [(p.tenant_id, p.child_id, p.instant, lowest_id(p.instant - _ASKED_BEFORE), p.key) for p in places]
    found: dict[_Place, list[_ParentEnd]] = {place: [] for place in places}
    for row in await connection.fetch(SQL["ends"], *columns(asked, 5)):
        doomed = doom(WANTS[row["wants"]], row["state"] or "skipped", row["reason"])
        found[places[row["n"] - 1]].append(_ParentEnd(row["run_id"], doomed, row["coming"]))
    return found


async def parents_at(connection: Connection, job: Key, instant: datetime) -> str | None:
    """The runs of a job's parents that ended last for an instant, as PostgreSQL writes an array; None: it has none."""
    place = _Place(*job, instant, job.id)
    ends = (await _ends(connection, [place]))[place]
    return array([end.run_id for end in ends if end.run_id is not None])


async def release_stranded(connection: Connection, rows: Sequence[Row]) -> Settled:
    """Decide about runs that wait for parents of which none comes any more: those count as they ended for that instant,
    and as skipped if there never was a run."""
    await _share(connection, (row["tenant_id"] for row in rows), (row["join_key"] for row in rows))
    known = sorted((row["tenant_id"], row["id"], row["pending_parents"]) for row in rows)
    locked = {row["id"] for row in await connection.fetch(SQL["lock_stranded"], *columns(known, 3))}
    left = {
        _Place(row["tenant_id"], row["job_id"], row["logical_at"], row["join_key"]): row
        for row in rows
        if row["id"] in locked
    }
    told: dict[Key, _Told] = {}
    for place, ends in (await _ends(connection, list(left))).items():
        row = left[place]
        new = tuple(end.run_id for end in ends if end.run_id is not None and end.run_id not in row["parents"])
        doomed = max((end.doomed for end in ends), default=UPSTREAM_FAILED)
        told[Key(row["tenant_id"], row["id"])] = _Told(row["pending_parents"], doomed, new)
    return await _settle(connection, told)
