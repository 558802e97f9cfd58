"""Jobs that wait for jobs: the graph, what makes one impossible, and what a job's parents decide about it.

Nothing here recurses and each rule takes time in proportion to nodes and edges, because graphs come from outside.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from tocsin.errors import Conflict, InvalidInput

MOST_NODES = 10_000
MOST_EDGES = 50_000
MOST_PARENTS = 9_999
DEEPEST = 1_000
_MOST_NAMED = 20  # errors, nodes of a cycle or failed nodes that one message names

On = Literal["success", "failure", "completion"]
Reference = Annotated[str, Meta(min_length=1, max_length=128)]
Wrong = dict[str, str]
End: TypeAlias = tuple[str, str | None]  # the state and the reason of a run that has ended


class Dependency(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A parent, and how it must have ended: `success`, `failure` (dead), or `completion` (anyhow)."""

    job: Reference
    on: On = "success"


Wanted: TypeAlias = Reference | Dependency


def dependencies(wanted: Iterable[Wanted]) -> list[Dependency]:
    """Each in its long form; a name alone wants success."""
    return [Dependency(job=each) if isinstance(each, str) else each for each in wanted]


class Graph:
    """A graph that can be run: made by `Graph.of`, which refuses every other."""

    def __init__(self, parents: Mapping[str, Sequence[Dependency]]) -> None:
        self.parents = parents
        self.children: dict[str, list[str]] = {node: [] for node in parents}
        for node, wanted in parents.items():
            for each in wanted:
                self.children[each.job].append(node)
        self.order = self._sorted()

    @classmethod
    def of(cls, parents: Mapping[str, Sequence[Dependency]], where: str = "jobs") -> Graph:
        """The graph of these nodes; raises what is wrong with it, by path under `where`."""
        _refuse(_too_large(parents, where))
        _refuse(_wrong_edges(parents, where))
        graph = cls(parents)
        if len(graph.order) < len(parents):
            raise graph._cycle(where)
        if graph.depth > DEEPEST:
            raise InvalidInput.field(where, "too_deep", f"one job after another more than {DEEPEST:,} times")
        return graph

    @property
    def roots(self) -> list[str]:
        """The nodes without parents, in the order in which they are written."""
        return [node for node, wanted in self.parents.items() if not wanted]

    @property
    def layers(self) -> dict[str, int]:
        """How many nodes stand before each one on the longest way to it."""
        found: dict[str, int] = {}
        for node in self.order:
            found[node] = 1 + max((found[each.job] for each in self.parents[node]), default=-1)
        return found

    @property
    def depth(self) -> int:
        """The nodes on the longest way through."""
        return 1 + max(self.layers.values(), default=-1)

    def _sorted(self) -> list[str]:
        """Parents before children, otherwise as they are written; what is in or behind a cycle is left out."""
        pending = {node: len(wanted) for node, wanted in self.parents.items()}
        order = self.roots
        for node in order:  # grows while it is read
            for child in self.children[node]:
                pending[child] -= 1
                if not pending[child]:
                    order.append(child)
        return order

    @property
    def ring(self) -> list[str]:
        """The nodes of one cycle, in the direction of time; none if there is none. Whatever could not be sorted has a
        parent that could not either, so walking from parent to parent must come back to where it was."""
        sorted_ = set(self.order)
        node = next((node for node in self.parents if node not in sorted_), None)
        if node is None:
            return []
        walked: dict[str, None] = {}
        while node not in walked:
            walked[node] = None
            node = next(each.job for each in self.parents[node] if each.job not in sorted_)
        path = list(walked)
        ring = path[path.index(node) :][::-1]
        first = min(range(len(ring)), key=lambda place: ring[place])
        return ring[first:] + ring[:first]

    def _cycle(self, where: str) -> InvalidInput:
        ring = self.ring
        parents = [each.job for each in self.parents[ring[0]]]
        at = f"{where}.{ring[0]}.depends_on[{parents.index(ring[-1])}]"
        return InvalidInput.field(at, "dependency_cycle", f"waits for itself: {arrows([*ring, ring[0]])}")


def arrows(ring: list[str]) -> str:
    """A cycle in words; of a long one its beginning and its end."""
    if len(ring) > _MOST_NAMED:
        half = _MOST_NAMED // 2
        ring = [*ring[:half], f"… {len(ring) - 2 * half:,} more …", *ring[-half:]]
    return " → ".join(ring)


def _refuse(wrong: Iterator[Wrong]) -> None:
    found = list(islice(wrong, _MOST_NAMED))
    if found:
        raise InvalidInput.fields(found)


def _too_large(parents: Mapping[str, Sequence[Dependency]], where: str) -> Iterator[Wrong]:
    if len(parents) > MOST_NODES:
        yield {"path": where, "code": "too_many_jobs", "message": f"at most {MOST_NODES:,} jobs in one graph"}
        return
    if sum(map(len, parents.values())) > MOST_EDGES:
        yield {"path": where, "code": "too_many_edges", "message": f"at most {MOST_EDGES:,} dependencies in one graph"}
    for node, wanted in parents.items():
        if len(wanted) > MOST_PARENTS:
            path = f"{where}.{node}.depends_on"
            yield {"path": path, "code": "too_many_parents", "message": f"at most {MOST_PARENTS:,} parents of one job"}


def _wrong_edges(parents: Mapping[str, Sequence[Dependency]], where: str) -> Iterator[Wrong]:
    for node, wanted in parents.items():
        seen: set[str] = set()
        for place, each in enumerate(wanted):
            path = f"{where}.{node}.depends_on[{place}]"
            if each.job == node:
                yield {"path": path, "code": "self_dependency", "message": "a job cannot wait for itself"}
            elif each.job not in parents:
                yield {"path": path, "code": "unknown_job", "message": f"there is no job {each.job!r} in this graph"}
            elif each.job in seen:
                yield {"path": path, "code": "duplicate_dependency", "message": f"{each.job!r} is a parent already"}
            seen.add(each.job)


# ── what begins a run ────────────────────────────────────────────────────────────────────────────────────────────


class Start(NamedTuple):
    """What the runs of a job begin with: with runs of one job, whatever starts that; and by which timetable they come,
    if it is one that jobs can share (None: by hand, or by one that nobody else has)."""

    root: str
    timetable: str | None


class Starts(NamedTuple):
    """What each job's runs begin with; of those that have parents, the one job that these all follow from (None: there
    is none); and the jobs whose parents do not come together."""

    of: dict[str, Start]
    roots: dict[str, str | None]
    apart: list[str]


def starts(graph: Graph, timetables: Mapping[str, str | None]) -> Starts:
    """Parents come together if they follow from one job, or if they come by the same timetable: then each has a run
    for each instant, and none waits for one that never comes. `timetables`: of the jobs without parents."""
    found = Starts({}, {}, [])
    for node in graph.order:
        before = {found.of[each.job] for each in graph.parents[node]}
        if not before:
            found.of[node] = Start(node, timetables[node])
            continue
        roots, tables = {start.root for start in before}, {start.timetable for start in before}
        found.roots[node] = root = roots.pop() if len(roots) == 1 else None
        table = tables.pop() if len(tables) == 1 else None
        if root is None and table is None:
            found.apart.append(node)
        # What follows from jobs that only share a timetable follows, all of it, from where they meet.
        found.of[node] = Start(root or node, table)
    return found


# ── what the ends of parents mean ────────────────────────────────────────────────────────────────────────────────

FULFILLED, NOT_NEEDED, UPSTREAM_FAILED = 0, 1, 2
Skip = Literal["not_needed", "upstream_failed"]
_SKIPPED: tuple[End, ...] = (("skipped", "not_needed"), ("skipped", "upstream_failed"))
_SKIPS: tuple[Skip | None, ...] = (None, "not_needed", "upstream_failed")


def doom(on: str, state: str, reason: str | None) -> int:
    """What one ended parent means for a child that wants `on` of it: `FULFILLED`, `NOT_NEEDED` (it went another way:
    nothing is wrong) or `UPSTREAM_FAILED`. The greatest of all its parents' holds for the child."""
    if on == "completion":
        return FULFILLED
    if on == "failure":
        return FULFILLED if state == "dead" else NOT_NEEDED
    if state == "succeeded":
        return FULFILLED
    return NOT_NEEDED if state == "skipped" and reason == "not_needed" else UPSTREAM_FAILED


def skip_reason(doomed: int) -> Skip | None:
    """The reason for which a child is skipped that is doomed so; None: it runs."""
    return _SKIPS[doomed]


def verdict(edges: Iterable[tuple[str, str, str | None]]) -> Skip | None:
    """Why a child is skipped whose parents have all ended, each given as (on, state, reason); None: it runs."""
    return skip_reason(max((doom(*edge) for edge in edges), default=FULFILLED))


# ── a whole run ──────────────────────────────────────────────────────────────────────────────────────────────────


def outcome(ends: Iterable[End], cancelled: bool = False) -> Literal["succeeded", "dead", "cancelled"]:
    """How a run of a graph ends whose nodes have all ended so. A cancel that came too late changes nothing."""
    if all(_is_well(end) for end in ends):
        return "succeeded"
    return "cancelled" if cancelled else "dead"


def blame(ends: Mapping[str, End]) -> str:
    """Which nodes made a run of a graph fail; not those that only came after them."""
    at_fault = {node: end[0] for node, end in ends.items() if not _is_well(end) and end[1] != "upstream_failed"}
    named = ", ".join(f"{node} is {state}" for node, state in islice(at_fault.items(), _MOST_NAMED))
    more = len(at_fault) - _MOST_NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def _is_well(end: End) -> bool:
    return end[0] == "succeeded" or end == ("skipped", "not_needed")


def to_run_again(graph: Graph, ends: Mapping[str, End], only: str | None = None) -> list[str]:
    """Of a graph that was run, what is to be run again: all that did not end well, or never came to run, and what was
    skipped because of it. `only`: of what has ended just this node, and what was skipped because of it. Parents come
    before children."""
    again: dict[str, None] = {}
    for node in graph.order:
        end = ends.get(node)
        if end is None or (not _is_well(end) and only in (None, node)) or _follows(graph, node, end, again):
            again[node] = None
    return list(again)


def _follows(graph: Graph, node: str, end: End, again: Container[str]) -> bool:
    """Whether it was skipped by how its parents ended, for good or ill, and one of these is to end anew."""
    return end in _SKIPPED and any(each.job in again for each in graph.parents[node])


def check_again(graph: Graph, ends: Mapping[str, End], node: str) -> None:
    """Refuse to run one node of a graph again that was not to blame."""
    if _is_well(ends[node]):
        raise Conflict(f"{node} did not fail: run the workflow anew", code="nothing_failed")
    for each in graph.parents[node]:
        if each.job in ends and doom(each.on, *ends[each.job]) == UPSTREAM_FAILED:
            message = f"{node} waits for {each.job}, which did not succeed: retry that"
            raise Conflict(message, code="upstream_failed")


class Path(NamedTuple):
    """The chain of nodes that took longest, and how long."""

    nodes: list[str]
    length: float


def critical_path(
    order: Iterable[str], parents: Mapping[str, Iterable[str]], durations: Mapping[str, float | None]
) -> Path:
    """The chain of nodes whose durations add up to most; a node that took no time of its own (never ran, or has not
    started yet) is passed through without being named. `order`: parents before children."""
    total: dict[str, float] = {}
    before: dict[str, str | None] = {}
    last: str | None = None
    for node in order:
        before[node] = max(parents.get(node, ()), key=lambda parent: total[parent], default=None)
        longest = before[node]
        total[node] = (durations.get(node) or 0.0) + (total[longest] if longest is not None else 0.0)
        if last is None or total[node] > total[last]:
            last = node
    path: list[str] = []
    length = total[last] if last is not None else 0.0
    while last is not None:
        if durations.get(last) is not None:
            path.append(last)
        last = before[last]
    return Path(path[::-1], length)
