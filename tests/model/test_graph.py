"""Graphs: which are refused and how they are named, and what the ends of parents mean, against slow references."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model import reference_workflow as reference
from tocsin.errors import InvalidInput
from tocsin.model.graph import (
    DEEPEST,
    MOST_NODES,
    Dependency,
    Graph,
    blame,
    critical_path,
    dependencies,
    outcome,
    starts,
    to_run_again,
    verdict,
)

ONS = ("success", "failure", "completion")
OWN_ENDS = ("succeeded", "dead", "cancelled", "expired")
Edges = dict[str, list[tuple[str, str]]]


@st.composite
def dags(draw: st.DrawFn, most: int = 12) -> Edges:
    """Parents of each node; written in an order that has nothing to do with who comes first."""
    names = [f"n{i}" for i in range(draw(st.integers(1, most)))]
    edges: Edges = {}
    for place, name in enumerate(names):
        chosen = draw(st.lists(st.sampled_from(names[:place]), unique=True, max_size=4)) if place else []
        edges[name] = [(parent, draw(st.sampled_from(ONS))) for parent in chosen]
    return {name: edges[name] for name in draw(st.permutations(names))}


def parents_of(edges: Edges) -> dict[str, list[Dependency]]:
    return {node: [Dependency(job=parent, on=on) for parent, on in wanted] for node, wanted in edges.items()}


def chain(length: int) -> dict[str, list[Dependency]]:
    return {f"n{i}": [Dependency(job=f"n{i - 1}")] if i else [] for i in range(length)}


def refused(parents: dict[str, list[Dependency]]) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        Graph.of(parents)
    return caught.value


def named(problem: InvalidInput) -> list[tuple[str, str]]:
    return [(each["path"], each["code"]) for each in problem.errors or []]


def on_success(**parents: str) -> dict[str, list[Dependency]]:
    return {node: dependencies(wanted.split()) for node, wanted in parents.items()}


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(dags())
def test_parents_come_before_children(edges: Edges) -> None:
    graph = Graph.of(parents_of(edges))
    place = {node: i for i, node in enumerate(graph.order)}
    assert set(place) == set(edges) and len(graph.order) == len(edges)
    for node, wanted in edges.items():
        assert all(place[parent] < place[node] for parent, _ in wanted)
        assert {child for child in edges if node in dict(edges[child])} == set(graph.children[node])
    assert graph.roots == [node for node, wanted in edges.items() if not wanted]


@given(dags(most=8))
def test_the_depth_is_the_longest_way(edges: Edges) -> None:
    assert Graph.of(parents_of(edges)).depth == max(len(way) for way in ways(edges))


def ways(edges: Edges) -> list[list[str]]:
    """Every way through, from any node to any other behind it."""

    def back_from(node: str) -> list[list[str]]:
        return [[node]] + [[*way, node] for parent, _ in edges[node] for way in back_from(parent)]

    return [way for node in edges for way in back_from(node)]


@given(dags(), st.data())
def test_a_cycle_is_found_and_named(edges: Edges, data: st.DataObject) -> None:
    """One edge back from a node to one that it comes after, or none; then what is named is a cycle indeed."""
    way = data.draw(st.sampled_from(ways(edges)))
    edges[way[0]] = [*edges[way[0]], (way[-1], "success")]
    problem = refused(parents_of(edges))
    if len(way) == 1:
        assert problem.code == "self_dependency"
        return
    if problem.code == "duplicate_dependency":
        return
    assert problem.code == "dependency_cycle"
    ring = problem.detail.split("itself: ")[1].split(" → ")
    assert ring[0] == ring[-1] and len(set(ring)) == len(ring) - 1 >= 2
    assert all(before in dict(edges[after]) for before, after in pairwise(ring))
    [(path, _)] = named(problem)
    place = [parent for parent, _ in edges[ring[0]]].index(ring[-2])
    assert path == f"jobs.{ring[0]}.depends_on[{place}]"


def test_a_cycle_is_named_in_the_order_of_time() -> None:
    problem = refused(on_success(a="c", b="a", c="b", after="c"))
    assert problem.code == "dependency_cycle"
    assert "a → b → c → a" in problem.detail


def test_a_long_cycle_is_named_in_short() -> None:
    parents = chain(5_000)
    parents["n0"] = [Dependency(job="n4999")]
    problem = refused(parents)
    assert problem.code == "dependency_cycle" and len(problem.detail) < 500 and "more" in problem.detail


def test_each_wrong_edge_is_named() -> None:
    problem = refused(on_success(a="", b="a a", c="a c", d="a nobody"))
    assert named(problem) == [
        ("jobs.b.depends_on[1]", "duplicate_dependency"),
        ("jobs.c.depends_on[1]", "self_dependency"),
        ("jobs.d.depends_on[1]", "unknown_job"),
    ]
    assert problem.code == "invalid_input"
    assert refused(on_success(a="a")).code == "self_dependency"


def test_a_parent_on_two_conditions_is_a_duplicate() -> None:
    parents = {"a": [], "b": [Dependency(job="a"), Dependency(job="a", on="failure")]}
    assert refused(parents).code == "duplicate_dependency"


def test_many_wrong_edges_name_the_first() -> None:
    problem = refused({f"n{i}": [Dependency(job="nobody")] for i in range(5_000)})
    assert problem.code == "unknown_job" and len(problem.errors or []) == 20


@pytest.mark.parametrize(
    ("parents", "code"),
    [
        ({f"n{i}": [] for i in range(MOST_NODES + 1)}, "too_many_jobs"),
        (chain(DEEPEST + 1), "too_deep"),
        (chain(5_000), "too_deep"),
        ({f"n{i}": [Dependency(job="n0")] * 6 for i in range(MOST_NODES)}, "too_many_edges"),
        ({"all": [Dependency(job=f"n{i}") for i in range(10_000)]}, "too_many_parents"),
    ],
)
def test_what_is_too_large_is_refused(parents: dict[str, list[Dependency]], code: str) -> None:
    assert refused(parents).code == code


def test_what_is_just_small_enough_is_taken() -> None:
    assert Graph.of(chain(DEEPEST)).depth == DEEPEST
    wide: dict[str, list[Dependency]] = {f"n{i}": [] for i in range(MOST_NODES - 1)}
    assert Graph.of(wide | {"all": [Dependency(job=node) for node in wide]}).depth == 2


# ── what parents' ends mean ──────────────────────────────────────────────────────────────────────────────────────


@given(dags(), st.data(), st.booleans())
def test_every_node_ends_as_the_reference_says(edges: Edges, data: st.DataObject, cancelled: bool) -> None:
    own = {node: data.draw(st.sampled_from(OWN_ENDS)) for node in edges}
    found: dict[str, tuple[str, str | None]] = {}
    for node in Graph.of(parents_of(edges)).order:
        skipped = verdict((on, *found[parent]) for parent, on in edges[node])
        found[node] = (own[node], None) if skipped is None else ("skipped", skipped)
    assert found == reference.ends(edges, own)
    assert outcome(found.values(), cancelled) == reference.outcome(found, cancelled)


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        ([], None),
        ([("success", "succeeded", None)], None),
        ([("success", "dead", None)], "upstream_failed"),
        ([("success", "skipped", "skipped_overlap")], "upstream_failed"),
        ([("success", "skipped", "not_needed")], "not_needed"),
        ([("failure", "dead", None)], None),
        ([("failure", "succeeded", None)], "not_needed"),
        ([("failure", "cancelled", None)], "not_needed"),
        ([("failure", "skipped", "upstream_failed")], "not_needed"),
        ([("completion", "skipped", "upstream_failed")], None),
        ([("failure", "succeeded", None), ("success", "expired", "expired")], "upstream_failed"),
        ([("failure", "dead", None), ("success", "succeeded", None)], None),
    ],
)
def test_the_rule_by_example(edges: list[tuple[str, str, str | None]], said: str | None) -> None:
    assert verdict(edges) == said


@given(dags(), st.data())
def test_one_node_is_run_again_with_what_was_skipped_because_of_it(edges: Edges, data: st.DataObject) -> None:
    own = {name: data.draw(st.sampled_from(OWN_ENDS)) for name in edges}
    ends = reference.ends(edges, own)
    graph = Graph.of(parents_of(edges))
    for node, end in ends.items():
        well = end[0] == "succeeded" or end == ("skipped", "not_needed")
        again = to_run_again(graph, ends, node)
        assert set(again) == (set() if well else reference.again(edges, ends, node))
        assert again == [each for each in graph.order if each in again]
    unwell = {node for node, end in ends.items() if end not in (("succeeded", None), ("skipped", "not_needed"))}
    assert set(to_run_again(graph, ends)) == reference.again(edges, ends, *unwell)


def test_what_was_not_needed_is_decided_anew_with_what_it_watches() -> None:
    alarm = [Dependency(job="load", on="failure")]
    graph = Graph.of(
        on_success(extract="", load="extract", other="") | {"alarm": alarm, "after": [Dependency(job="alarm")]}
    )
    failed: dict[str, tuple[str, str | None]] = {
        "extract": ("dead", None), "load": ("skipped", "upstream_failed"), "alarm": ("skipped", "not_needed"),
        "after": ("skipped", "not_needed"), "other": ("succeeded", None),
    }  # fmt: skip
    assert set(to_run_again(graph, failed)) == {"extract", "load", "alarm", "after"}
    assert set(to_run_again(graph, failed, "extract")) == {"extract", "load", "alarm", "after"}
    assert to_run_again(graph, failed | {"other": ("dead", None)}, "other") == ["other"]


def test_blame_names_those_at_fault_and_not_what_came_after() -> None:
    fine = {f"n{i}": ("succeeded", None) for i in range(3)}
    assert blame({**fine, "a": ("dead", None), "b": ("skipped", "upstream_failed")}) == "a is dead"
    many = {f"m{i}": ("dead", None) for i in range(30)}
    assert blame(many).endswith("m19 is dead and 10 more")


# ── the critical path ────────────────────────────────────────────────────────────────────────────────────────────


@given(dags(most=8), st.data())
def test_the_critical_path_is_the_longest_of_all(edges: Edges, data: st.DataObject) -> None:
    took = {node: data.draw(st.none() | st.integers(0, 100)) for node in edges}
    graph = Graph.of(parents_of(edges))
    path = critical_path(graph.order, {node: [p for p, _ in wanted] for node, wanted in edges.items()}, took)
    assert path.length == max(sum(took[node] or 0 for node in way) for way in ways(edges))
    assert path.length == sum(took[node] or 0 for node in path.nodes)
    assert any(path.nodes == [node for node in way if took[node] is not None] for way in ways(edges))


# ── what begins a run ────────────────────────────────────────────────────────────────────────────────────────────


@given(dags(), st.data())
def test_who_waits_for_several_waits_for_none_that_never_comes(edges: Edges, data: st.DataObject) -> None:
    """Whatever begins a chain, an instant of a timetable or a run by hand: where a run is made because one parent has
    ended, all the other parents come to their ends, too."""
    graph = Graph.of(parents_of(edges))
    tables = {root: data.draw(st.sampled_from([None, "daily", "hourly"])) for root in graph.roots}
    found = starts(graph, tables)
    chains: list[tuple[str | None, set[str]]] = [(node, {node}) for node in edges]
    chains += [(None, {root for root in graph.roots if tables[root] == table}) for table in ("daily", "hourly")]
    for by_hand, reached in chains:
        for node in graph.order:
            parents = {each.job for each in graph.parents[node]}
            if node in found.apart or node in reached or not parents & reached:
                continue
            if by_hand is None or len(parents) == 1 or found.roots[node] == by_hand:
                assert parents <= reached | set(found.apart) | _behind(graph, found.apart), (node, by_hand)
                reached.add(node)


def _behind(graph: Graph, apart: list[str]) -> set[str]:
    """All that follow from jobs that are refused."""
    behind = set(apart)
    for node in graph.order:
        if behind & {each.job for each in graph.parents[node]}:
            behind.add(node)
    return behind


def test_parents_follow_from_one_job_or_share_a_timetable() -> None:
    graph = Graph.of(on_success(a="", b="", c="a b", d="c", e="c d", f="e a", g="a d", x="", y="a x"))
    found = starts(graph, {"a": "daily", "b": "daily", "x": None})
    assert found.apart == ["y"] and starts(graph, {"a": "daily", "b": None, "x": "daily"}).apart[0] == "c"
    assert {node: found.roots[node] for node in "cdefg"} == {"c": None, "d": "c", "e": "c", "f": None, "g": None}
