"""Workflows in Python: the documents that `>>` makes, and their runs under `app.testing()`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import reference_workflow as reference
from tests.model.test_graph import Edges, dags
from tocsin import App, Context
from tocsin.client.job import RunFailed
from tocsin.errors import InvalidInput
from tocsin.model.workflow import check
from tocsin.wire import decode_workflow_spec, encode

NOW = datetime(2026, 3, 6, 8, 0, tzinfo=UTC)


class Shop:
    """An app with a few jobs; what they were called with."""

    def __init__(self) -> None:
        self.app = App("shop")
        self.seen: list[Any] = []
        app, seen = self.app, self.seen

        @app.job
        def extract(day: str = "today", fail: bool = False) -> dict[str, Any]:
            seen.append(("extract", day))
            if fail:
                raise ValueError("no source")
            return {"day": day, "files": ["a", "b"]}

        @app.job(retries=0, timeout="5m", overlap="allow", tags={"team": "x"})
        async def clean(ctx: Context) -> str:
            seen.append(("clean", ctx.results["extract"]["day"], ctx.parents["extract"].state))
            return "cleaned"

        @app.job(retries=0)
        def load(ctx: Context, item: str = "") -> str:
            seen.append(("load", item, sorted(ctx.results)))
            return f"loaded {item}"

        @app.job
        def apologise(ctx: Context) -> None:
            seen.append(("apologise", {name: parent.state for name, parent in ctx.parents.items()}))

        self.extract, self.clean, self.load, self.apologise = extract, clean, load, apologise


def parents_in(workflow: Any) -> dict[str, Any]:
    decoded = decode_workflow_spec(encode(workflow.document))
    check(decoded)
    return {name: node.get("depends_on", []) for name, node in workflow.document["jobs"].items()}


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_block_takes_up_what_is_joined_in_it() -> None:
    shop = Shop()
    with shop.app.workflow("nightly", cron="0 2 * * *", timezone="Europe/Berlin", max_concurrency=1) as nightly:
        shop.extract >> [shop.clean, shop.load.step("copy")] >> shop.load
        [shop.clean, shop.load] >> shop.apologise.on("failure")
    assert parents_in(nightly) == {
        "extract": [],
        "clean": ["extract"],
        "copy": ["extract"],
        "load": ["clean", "copy"],
        "apologise": [{"job": "clean", "on": "failure"}, {"job": "load", "on": "failure"}],
    }
    document = nightly.document
    assert document["schedule"] == {"cron": "0 2 * * *", "timezone": "Europe/Berlin"}
    assert document["max_concurrency"] == 1 and document["tags"] == {"tocsin.app": "shop"}
    clean = document["jobs"]["clean"]
    assert clean == {
        "target": {"kind": "python", "function": "shop.clean"},
        **{"retry": {"max_attempts": 1}, "timeout": "5m", "tags": {"team": "x"}, "depends_on": ["extract"]},
    }


def test_the_same_without_a_block_and_with_steps_of_other_kinds() -> None:
    shop = Shop()
    tidy = shop.app.step("tidy", target={"kind": "process", "command": ["rm", "-rf", "/tmp/x"]}, timeout=90)
    eu, us = shop.extract.step("eu", day="monday"), shop.extract.step("us")
    nightly = shop.app.workflow("nightly", [eu, us] >> shop.load, shop.load >> tidy.on("completion"), shop.clean)
    assert parents_in(nightly) == {
        **{"eu": [], "us": [], "load": ["eu", "us"], "tidy": [{"job": "load", "on": "completion"}], "clean": []}
    }
    assert nightly.document["schedule"] == {"manual": True}
    assert nightly.document["jobs"]["eu"]["target"]["kwargs"] == {"day": "monday"}
    assert nightly.document["jobs"]["tidy"]["timeout"] == "PT90S"


def test_joining_outside_of_a_block_adds_to_nothing() -> None:
    shop = Shop()
    with shop.app.workflow("one") as one:
        shop.extract >> shop.load
    shop.load >> shop.clean
    assert parents_in(one) == {"extract": [], "load": ["extract"]}


def test_what_only_a_programmer_can_get_wrong_is_refused_at_once() -> None:
    shop = Shop()
    app = shop.app
    with pytest.raises(TypeError, match="takes no option corn"):
        app.workflow("a", corn="0 2 * * *")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="one schedule"):
        app.workflow("b", cron="0 2 * * *", every="5m")
    with pytest.raises(ValueError, match="not on 'sometimes'"):
        shop.load.on("sometimes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no jobs"):
        app.workflow("c").document  # noqa: B018
    with pytest.raises(ValueError, match="named 'c'"):
        app.workflow("c")
    with pytest.raises(ValueError, match="stands twice"):
        app.workflow("d", shop.extract >> shop.load.map("extract.files"), shop.load >> shop.clean)
    with pytest.raises(ValueError, match="and cannot on failure, too"):
        app.workflow("e", shop.extract >> shop.load, shop.extract >> shop.load.on("failure"))
    with pytest.raises(TypeError, match="not of a str"):
        ["extract"] >> shop.load
    with app.workflow("f"), pytest.raises(RuntimeError, match="within another"), app.workflow("g"):
        pass


def test_a_sensitive_job_is_refused() -> None:
    app = App()

    @app.job(sensitive=True)
    def pay() -> None: ...

    with pytest.raises(ValueError, match="sensitive"):
        app.workflow("w", pay)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def states(run: Any) -> dict[str, tuple[str, str | None]]:
    return {name: (node["state"], node["reason"]) for name, node in run.nodes.items()}


def test_children_see_what_their_parents_returned() -> None:
    shop = Shop()
    nightly = shop.app.workflow("nightly", shop.extract >> shop.clean >> shop.apologise.on("failure"))
    with shop.app.testing(NOW):
        run = nightly.submit(day="monday").wait()
    assert run.state == "succeeded"
    assert states(run) == {
        "extract": ("succeeded", None),
        "clean": ("succeeded", None),
        "apologise": ("skipped", "not_needed"),
    }
    assert shop.seen == [("extract", "monday"), ("clean", "monday", "succeeded")]
    assert run.result is None


def test_what_fails_is_made_good_and_the_whole_has_failed() -> None:
    shop = Shop()
    nightly = shop.app.workflow(
        "nightly", shop.extract >> shop.clean >> shop.load, shop.extract >> shop.apologise.on("failure")
    )
    with shop.app.testing(NOW) as testing:
        run = nightly.submit(fail=True)
        with pytest.raises(TimeoutError, match="due later"):
            run.wait()
        testing.advance("1h")
        run.wait()
    assert run.state == "dead" and run.document["error"]["message"] == "extract is dead"
    assert states(run) == {
        "extract": ("dead", None),
        "clean": ("skipped", "upstream_failed"),
        "load": ("skipped", "upstream_failed"),
        "apologise": ("succeeded", None),
    }
    assert shop.seen == [*[("extract", "today")] * 4, ("apologise", {"extract": "dead"})]
    with pytest.raises(RunFailed, match="workflow_failed"):
        run.result  # noqa: B018


def test_one_run_for_each_element_and_their_results_as_one() -> None:
    shop = Shop()
    each = shop.load.map("extract.files")

    @shop.app.job
    def count(ctx: Context) -> int:
        return len(ctx.results["load"])

    nightly = shop.app.workflow("nightly", shop.extract >> each >> count)
    with shop.app.testing(NOW):
        run = nightly.submit().wait()
    assert run.state == "succeeded"
    assert run.nodes["load"]["result"] == ["loaded a", "loaded b"] and run.nodes["count"]["result"] == 2
    assert shop.seen[1:] == [("load", "a", ["extract"]), ("load", "b", ["extract"])]


@pytest.mark.parametrize(("over", "most"), [("extract.nothing", None), ("extract.files", 1)])
def test_what_cannot_be_mapped_over_fails_its_node(over: str, most: int | None) -> None:
    shop = Shop()
    nightly = shop.app.workflow("nightly", shop.extract >> shop.load.map(over, max=most))
    with shop.app.testing(NOW):
        run = nightly.submit().wait()
    assert run.nodes["load"]["error"]["class"] == "map_failed"


async def test_in_async_code_it_is_awaited() -> None:
    shop = Shop()
    nightly = shop.app.workflow("nightly", shop.extract >> shop.clean)
    with shop.app.testing(NOW):
        run = await nightly.submit_in("10m")
        with pytest.raises(TimeoutError, match="due at"):
            await run.wait()
        await shop.app.backend.advance("10m")  # type: ignore[attr-defined]
        assert (await run.wait()).state == "succeeded"


def test_its_schedule_is_kept() -> None:
    shop = Shop()
    shop.app.workflow("nightly", shop.extract >> shop.clean, cron="0 2 * * *")
    with shop.app.testing(NOW) as testing:
        testing.advance("2d")
        heads = [run for run in testing.runs if run.document["job_name"] == "nightly"]
    assert [run.document["scheduled_for"][:13] for run in heads] == ["2026-03-07T02", "2026-03-08T02"]
    assert {run.state for run in heads} == {"succeeded"}


def test_what_is_no_function_cannot_be_run_here_and_a_bad_graph_is_refused() -> None:
    shop = Shop()
    tidy = shop.app.step("tidy", target={"kind": "process", "command": ["true"]})
    nightly = shop.app.workflow("nightly", shop.extract >> tidy)
    with shop.app.testing(NOW), pytest.raises(RuntimeError, match=r"nightly\.tidy is no function"):
        nightly.submit().wait()
    shop = Shop()
    shop.app.workflow("round", shop.extract >> shop.clean >> shop.extract)
    with pytest.raises(InvalidInput, match="clean → extract → clean"):
        shop.app.testing(NOW)


@given(dags(), st.data())
@settings(max_examples=60)
def test_every_node_ends_as_the_reference_says(edges: Edges, data: st.DataObject) -> None:
    own = {node: data.draw(st.sampled_from(("succeeded", "dead"))) for node in edges}
    app, ran = App(), []

    @app.job(retries=0)
    def node(ctx: Context, name: str) -> None:
        ran.append(name)
        assert set(ctx.parents) == {parent for parent, _ in edges[name]}
        if own[name] == "dead":
            raise ValueError(name)

    steps = {name: node.step(name, name=name) for name in edges}
    whole = app.workflow("whole", *steps.values())
    for child, parents in edges.items():
        for parent, on in parents:
            whole.add(steps[parent] >> steps[child].on(on))  # type: ignore[arg-type]
    with app.testing(NOW):
        run = whole.submit().wait()
    wanted = reference.ends(edges, own)
    assert states(run) == wanted
    assert run.state == reference.outcome(wanted)
    assert sorted(ran) == sorted(name for name, (state, _) in wanted.items() if state != "skipped")
    place = {name: i for i, name in enumerate(ran)}
    assert all(place[parent] < place[child] for child in ran for parent, _ in edges[child] if parent in place)
