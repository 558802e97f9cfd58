"""The workflow document: what decodes, what is refused where, and the jobs that it is kept as."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.errors import InvalidInput, NotSupported
from tocsin.model import job
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.workflow import BadMap, Map, Node, WorkflowSpec, check, head_spec, node_specs, workflow_of
from tocsin.wire import decode_job_spec, decode_workflow_spec, encode

PROCESS = {"kind": "process", "command": ["true"]}


def spec(jobs: dict[str, Any] | None = None, **given: Any) -> WorkflowSpec:
    nodes = jobs or {"extract": {}, "load": {"depends_on": ["extract"]}}
    document = {"name": "nightly", "jobs": {name: {"target": PROCESS} | node for name, node in nodes.items()}} | given
    return decode_workflow_spec(json.dumps(document).encode())


def refused(found: WorkflowSpec) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        check(found)
    return caught.value


def test_a_job_field_is_a_nodes_too_or_is_known_not_to_be() -> None:
    """Whoever adds a field to jobs decides here what it means for the nodes of a workflow."""
    of_the_whole = {"name", "schedule", "overlap"}
    not_built = {"sensitive", "sealed"}
    assert {*Node.__struct_fields__, *of_the_whole, *not_built} == {*JobSpec.__struct_fields__, "map"}


def test_the_head_reads_back_as_the_document() -> None:
    found = spec(
        {
            "extract": {"timeout": "90s", "retry": {"max_attempts": 2}, "tags": {"a": "b"}},
            "load": {"depends_on": [{"job": "extract", "on": "completion"}], "priority": 7},
            "each": {"depends_on": ["extract"], "map": {"over": "extract.files", "max": 5}},
        },
        schedule={"cron": "0 2 * * *"},
        overlap="queue",
        max_concurrency=2,
        priority=600,
    )
    assert check(found).order == ["extract", "load", "each"]
    stored = encode(head_spec(found))
    head = decode_job_spec(stored)
    assert workflow_of(head) == found
    assert (head.pool, head.priority, head.overlap, head.retry.max_attempts) == ("workflows", 600, "queue", 1)
    assert encode(head_spec(workflow_of(head))) == stored


def test_nothing_said_is_manual_and_takes_a_week_at_most() -> None:
    head = head_spec(spec())
    assert head.schedule == Schedule(manual=True)
    assert str(head.timeout) == "P7D"


def test_nodes_are_jobs_that_only_the_workflow_runs() -> None:
    found = node_specs(spec({"a": {}, "b": {"depends_on": ["a"], "map": {"over": "a"}, "priority": 9}}, priority=3))
    assert {name: (each.name, each.priority) for name, each in found.items()} == {
        "a": ("nightly.a", 3),
        "b": ("nightly.b", 9),
    }
    for each in found.values():
        assert each.schedule == Schedule(manual=True) and each.depends_on == []
        job.check(each)


def test_a_head_is_no_job_that_somebody_may_post() -> None:
    with pytest.raises(InvalidInput) as caught:
        job.check(head_spec(spec()))
    assert [each["path"] for each in caught.value.errors or []] == ["target.kind"]
    assert "/v1/workflows" in caught.value.detail


@pytest.mark.parametrize(
    "given",
    [
        {"colour": "red"},
        {"jobs": {}},
        {"jobs": {"a b": {"target": PROCESS}}},
        {"jobs": {"a" * 65: {"target": PROCESS}}},
        {"jobs": {"a.b": {"target": PROCESS}}},
        {"jobs": {"a": {}}},
        {"jobs": {"a": {"target": PROCESS, "name": "x"}}},
        {"jobs": {"a": {"target": PROCESS, "schedule": {"cron": "* * * * *"}}}},
        {"jobs": {"a": {"target": {"kind": "workflow", "jobs": {}}}}},
        {"jobs": {"a": {"target": PROCESS, "depends_on": [{"job": "b", "on": "sometimes"}]}}},
        {"jobs": {"a": {"target": PROCESS, "depends_on": [5]}}},
        {"jobs": {"a": {"target": PROCESS, "map": {"over": "x", "max": 10_001}}}},
        {"jobs": {"a": {"target": PROCESS, "map": {"over": ".x"}}}},
        {"name": None},
    ],
)
def test_a_wrong_shape_does_not_decode(given: dict[str, Any]) -> None:
    document = {"name": "nightly", "jobs": {"a": {"target": PROCESS}}} | given
    with pytest.raises(msgspec.ValidationError):
        decode_workflow_spec(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("jobs", "given", "path", "code"),
    [
        ({"a": {"timeout": "P8D"}}, {}, "jobs.a.timeout", "invalid_input"),
        ({"a": {"depends_on": ["b"]}, "b": {"depends_on": ["a"]}}, {}, "jobs.a.depends_on[0]", "dependency_cycle"),
        ({"a": {"depends_on": ["other.a"]}}, {}, "jobs.a.depends_on[0]", "unknown_job"),
        ({"a": {"map": {"over": "b"}}, "b": {}}, {}, "jobs.a.map.over", "not_a_parent"),
        (
            {"a": {"depends_on": [{"job": "b", "on": "completion"}], "map": {"over": "b.x"}}, "b": {}},
            *({}, "jobs.a.map.over", "not_a_parent"),
        ),
        ({"a": {"notify": [{}]}}, {}, "jobs.a.notify", "not_supported"),
        ({"a" * 64: {}}, {"name": "n" * 64}, f"jobs.{'a' * 64}", "invalid_input"),
        (None, {"timeout": "P8D"}, "timeout", "invalid_input"),
        (None, {"schedule": {}}, "schedule", "invalid_input"),
    ],
)
def test_a_wrong_meaning_is_named(jobs: dict[str, Any] | None, given: dict[str, Any], path: str, code: str) -> None:
    problem = refused(spec(jobs, **given))
    assert [each["path"] for each in problem.errors or []] == [path]
    assert problem.code == code
    assert isinstance(problem, NotSupported) == (code == "not_supported")


def test_every_wrong_job_is_named_at_once_up_to_a_number() -> None:
    problem = refused(spec({f"n{i}": {"timeout": "PT0S"} for i in range(100)}))
    assert len(problem.errors or []) == 20


# ── map ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers() | st.text() | st.dictionaries(st.text(), st.integers()), max_size=20))
def test_one_run_for_each_element(elements: list[Any]) -> None:
    found = Map(over="extract.in.files").args_for({"in": {"files": elements}})
    assert [
        args if isinstance(element, dict) else args["item"] for args, element in zip(found, elements, strict=True)
    ] == elements
    assert Map(over="extract").args_for(elements) == found


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"files": "no list"}, "no list"),
        ({"other": []}, "has no 'files'"),
        ([1, 2], "has no 'files'"),
        (None, "has no 'files'"),
        ({"files": [1, 2, 3]}, "3 elements, at most 2"),
    ],
)
def test_what_cannot_be_mapped_over_says_why(result: Any, says: str) -> None:
    with pytest.raises(BadMap, match=says):
        Map(over="extract.files", max=2).args_for(result)
