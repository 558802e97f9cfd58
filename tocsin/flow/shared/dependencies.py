"""Jobs that depend on other jobs: which graphs of them may be, and how they are kept.

Whoever changes a tenant's graph is alone with it (`joins.hold_graph`): what one call has checked no other undoes, and
no graph changes under runs that are being decided about. Calls that have nothing to do with one never wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tocsin.errors import Conflict, Contention, InvalidInput
from tocsin.flow.shared.joins import LETTERS, WANTS, see_all
from tocsin.flow.shared.transitions import Key, lock_jobs
from tocsin.model.access import Identity
from tocsin.model.graph import (
    DEEPEST,
    MOST_EDGES,
    MOST_NODES,
    MOST_PARENTS,
    Dependency,
    Graph,
    Starts,
    Wrong,
    arrows,
    starts,
)
from tocsin.model.ids import parse_id
from tocsin.model.job import Schedule
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import seed_of, shared_timetable
from tocsin.store.db import Connection, Row, Sql, columns

SQL = Sql(__file__)
_MOST_NAMED = 20


class Member(NamedTuple):
    """A job of a graph, as it will be: its name, and the timetable by which it comes (None: by hand)."""

    name: str | None
    timetable: str | None


class Child(NamedTuple):
    """A job and what it is to wait for; `path` leads to its document in the call."""

    id: str
    wanted: Sequence[Dependency]
    path: str = ""

    def at(self, place: int | None = None) -> str:
        """The path of its parents, or of one of them."""
        return f"{self.path}depends_on" + ("" if place is None else f"[{place}]")


Parents = dict[str, dict[str, str]]  # child → parent → on


class Links(NamedTuple):
    """A graph that may be: the edges of the jobs whose parents change, and others that follow from another job now."""

    parents: Parents
    roots: dict[str, str | None]
    moved: dict[str, str | None]


NO_LINKS = Links({}, {}, {})


def member(who: Identity, job_id: str, name: str | None, schedule: Schedule | None, anchor: datetime) -> Member:
    """A job as a member of a graph."""
    return Member(name, shared_timetable(schedule, anchor, seed_of(who.tenant, name, job_id)))


async def parents_of(connection: Connection, tenant_id: int, child_id: str) -> dict[str, str]:
    """What a job waits for: parent → on."""
    rows = await connection.fetch(SQL["parents"], tenant_id, child_id)
    return {row["parent_id"]: WANTS[row["wants"]] for row in rows}


async def find(
    connection: Connection, who: Identity, children: Sequence[Child], newcomers: Mapping[str, str] | None = None
) -> Parents:
    """The jobs that these children name, by name or id; `newcomers`: the ids of those that come with them, by name.
    Raises which of them there are not."""
    named = sorted({each.job for child in children for each in child.wanted} - set(newcomers or ()))
    ids = {name: id_ for name in named if (id_ := parse_id(name)) is not None}
    rows = await connection.fetch(SQL["named"], who.tenant_id, named, list(ids.values()))
    seen = [row for row in rows if _sees(who, row)]
    there = {row["id"] for row in seen}
    known = dict(newcomers or {}) | {row["name"]: row["id"] for row in seen if row["name"] is not None}
    known |= {name: id_ for name, id_ in ids.items() if id_ in there}
    found: Parents = {}
    wrong: list[Wrong] = []
    for child in children:
        parents = found[child.id] = {}
        if len(child.wanted) > MOST_PARENTS:
            told = f"at most {MOST_PARENTS:,} parents of one job"
            wrong.append({"path": child.at(), "code": "too_many_parents", "message": told})
            continue
        for place, each in enumerate(child.wanted):
            parent = known.get(each.job)
            if parent is None:
                told = f"there is no open job {each.job!r}; make it first, or in the same batch"
                wrong.append({"path": child.at(place), "code": "unknown_job", "message": told})
            elif parent == child.id:
                told = "a job cannot wait for itself"
                wrong.append({"path": child.at(place), "code": "self_dependency", "message": told})
            elif parent in parents:
                told = f"{each.job!r} is a parent already"
                wrong.append({"path": child.at(place), "code": "duplicate_dependency", "message": told})
            else:
                parents[parent] = each.on
    if wrong:
        raise InvalidInput.fields(wrong[:_MOST_NAMED])
    return found


async def hold(
    connection: Connection,
    who: Identity,
    children: Sequence[Child],
    newcomers: Mapping[str, str] | None = None,
    also: Iterable[str] = (),
) -> Parents:
    """The same, with those jobs held so that they stay open, and others, in their order. Hold the graph first."""
    found = await find(connection, who, children, newcomers)
    there = {parent for wanted in found.values() for parent in wanted} - set((newcomers or {}).values())
    await lock_jobs(connection, [Key(who.tenant_id, id_) for id_ in there.union(also)])
    if await find(connection, who, children, newcomers) != found:
        raise Contention("a parent was renamed at the same moment; try again")
    return found


async def drifted(connection: Connection, who: Identity, child: Child) -> bool:
    """Whether the names by which a job knows its parents have become those of others. A name that nobody has any more
    stands for whoever had it."""
    try:
        found = await find(connection, who, [child])
    except InvalidInput:
        return False
    return found[child.id] != await parents_of(connection, who.tenant_id, child.id)


def _sees(who: Identity, row: Row) -> bool:
    return who.scope is None or who.scope.has(row["name"], msgspec.json.decode(row["tags"] or "{}"))


async def check(
    connection: Connection,
    who: Identity,
    children: Sequence[Child],
    parents: Parents,
    changed: Mapping[str, Member],
) -> Links:
    """What these parents of these children come to; raises why they may not be. `changed`: jobs that are new, or will
    come by another timetable."""
    await see_all(connection)
    below = await connection.fetch(SQL["below"], who.tenant_id, sorted({*parents, *changed}), MOST_NODES + 1)
    ids = {row["id"] for row in below} | {parent for each in parents.values() for parent in each}
    edges = await connection.fetch(SQL["above"], who.tenant_id, sorted(ids), MOST_EDGES + 1)
    before = {edge["child_id"]: edge["root_id"] for edge in edges if edge["child_id"] not in parents}
    drawn: dict[str, list[Dependency]] = {id_: [] for id_ in ids | parents.keys()}
    for edge in edges:
        drawn.setdefault(edge["parent_id"], [])
        if edge["child_id"] in before:
            drawn.setdefault(edge["child_id"], []).append(Dependency(job=edge["parent_id"], on=WANTS[edge["wants"]]))  # type: ignore[arg-type]
    for child, wanted in parents.items():
        drawn[child] = [Dependency(job=parent, on=on) for parent, on in wanted.items()]  # type: ignore[arg-type]
    where = children[0].at() if children else "schedule"
    if len(drawn) > MOST_NODES or sum(map(len, drawn.values())) > MOST_EDGES:
        told = f"at most {MOST_NODES:,} jobs and {MOST_EDGES:,} dependencies in one graph"
        raise InvalidInput.field(where, "too_many_jobs", told)
    members = await _members(connection, who, drawn.keys(), changed)
    graph = Graph(drawn)
    _refuse_ring(graph, children, members)
    if graph.depth > DEEPEST:
        raise InvalidInput.field(where, "too_deep", f"one job after another more than {DEEPEST:,} times")
    found = starts(graph, {id_: each.timetable for id_, each in members.items()})
    _refuse_apart(graph, found, children, members)
    moved = {child: root for child, root in found.roots.items() if child in before and before[child] != root}
    return Links(parents, {child: found.roots.get(child) for child in parents}, moved)


async def _members(
    connection: Connection, who: Identity, ids: Iterable[str], changed: Mapping[str, Member]
) -> dict[str, Member]:
    rows = await connection.fetch(SQL["members"], who.tenant_id, sorted(set(ids) - changed.keys()))
    found = dict(changed)
    for row in rows:
        schedule = msgspec.json.decode(row["schedule"] or "null", type=Schedule | None, dec_hook=decode_scalar)
        found[row["id"]] = member(who, row["id"], row["name"], schedule, row["anchor"])
    return found


def _refuse_ring(graph: Graph, children: Sequence[Child], members: Mapping[str, Member]) -> None:
    ring = graph.ring
    if not ring:
        return
    # There was none before: one of its jobs is a child whose parents are new.
    child = next(child for child in children if child.id in ring)
    before = ring[ring.index(child.id) - 1]
    place = [each.job for each in graph.parents[child.id]].index(before)
    named = [_name(id_, members) for id_ in [*ring, ring[0]]]
    raise InvalidInput.field(child.at(place), "dependency_cycle", f"waits for itself: {arrows(named)}")


def _refuse_apart(graph: Graph, found: Starts, children: Sequence[Child], members: Mapping[str, Member]) -> None:
    paths = {child.id: child.at() for child in children}
    wrong = []
    for node in found.apart[:_MOST_NAMED]:
        roots = {found.of[each.job].root: each.job for each in graph.parents[node]}
        (first, one), (second, other) = list(roots.items())[:2]
        told = (
            f"{_follows(one, first, members)} and {_follows(other, second, members)} do not come together: give both "
            "the same schedule, or let both follow from one job"
        )
        if node not in paths:
            told = f"{_name(node, members)!r} waits for several jobs; {told}"
        path = paths.get(node, next(iter(paths.values()), "schedule"))
        wrong.append({"path": path, "code": "different_schedules", "message": told})
    if wrong:
        raise InvalidInput.fields(wrong)


def _follows(job: str, root: str, members: Mapping[str, Member]) -> str:
    name = repr(_name(job, members))
    return name if job == root else f"{name} (which follows from {_name(root, members)!r})"


def _name(job: str, members: Mapping[str, Member]) -> str:
    return members[job].name or job


async def refuse_awaited(connection: Connection, tenant_id: int, child_id: str) -> None:
    """What a run waits for was settled when it was made: while there is one, its job's parents stay who they are."""
    run_id = await connection.fetchval(SQL["awaiting"], tenant_id, child_id)
    if run_id is not None:
        raise Conflict(
            f"run {run_id} waits for the parents that the job has; change them when it has ended, or cancel it",
            code="runs_waiting",
        )


async def keep(connection: Connection, tenant_id: int, links: Links, were: Iterable[str] = ()) -> None:
    """Write it down. Lock the jobs first: the children, their parents, and those that `were` their parents."""
    if links.parents:
        rows = [
            (child, parent, LETTERS[on], len(wanted), links.roots[child])
            for child, wanted in links.parents.items()
            for parent, on in wanted.items()
        ]
        await connection.execute(SQL["unlink"], tenant_id, list(links.parents))
        await connection.execute(SQL["link"], tenant_id, *columns(rows, 5))
        concerned = {parent for wanted in links.parents.values() for parent in wanted}.union(were)
        await connection.execute(SQL["set_joins"], tenant_id, sorted(concerned))
    if links.moved:
        await connection.execute(SQL["set_roots"], tenant_id, *columns(list(links.moved.items()), 2))
