"""What the page about workflows shows works: its files, commands and Python, against a real Tocsin with a worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.docs.kit import Running, block, page, session, started

PAGE = page("docs/how-to/workflows.md")
PIPELINE = block(PAGE, "python", 'App("pipeline")')


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    files = {"nightly.yaml": block(PAGE, "yaml", "name: nightly"), "pipeline.py": PIPELINE}
    with started(files, "pipeline:app", "tocsin workflow show import") as made:
        yield made


def test_its_commands_do_what_it_says(running: Running) -> None:
    done = running.type(["sh", "-c"], session(PAGE))
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    blocks = done.stdout.split("## block ")
    first, followed, shown, again, imported, whole = blocks[1:]
    assert "extract ─┬─► clean ─┬─► load ─► alarm on failure" in first
    assert "alarm  succeeded" in followed and "load: exit: exit code 1" in followed
    assert followed.rstrip().endswith("it did not succeed")
    assert "✗ load try 2" in shown and "✓ alarm" in shown
    assert "changed nightly" in again and "to version 2" in again and again.rstrip().endswith("succeeded")
    assert "find ─► convert for each of find.files ─► total ─► apologise on failure" in imported
    assert imported.rstrip().endswith("succeeded")
    assert "31 runs:" in whole and "unchanged nightly" in whole


def test_its_python_asks_for_a_run_and_reads_what_came_of_it(running: Running) -> None:
    done = running.type([sys.executable, "-c"], block(PAGE, "python", "import_.submit"))
    assert done.stdout.splitlines()[-1] == f"succeeded {3 * len('tuesday-a.csv')}", done.stdout
    run = json.loads(running.type(["sh", "-c"], "tocsin workflow show import --last --json").stdout)
    nodes = {node["name"]: node for node in run["nodes"]}
    assert nodes["convert"]["elements"] == {"succeeded": 3}
    assert (nodes["apologise"]["state"], nodes["apologise"]["reason"]) == ("skipped", "not_needed")


def test_its_pipeline_runs_without_a_server() -> None:
    names: dict[str, object] = {}
    exec(PIPELINE, names)  # noqa: S102 (our own page)
    with names["app"].testing("2026-03-06T08:00:00Z") as testing:  # type: ignore[attr-defined]
        run = names["import_"].submit(day="monday")  # type: ignore[attr-defined]
        testing.run()
        assert (run.wait().state, run.nodes["total"]["result"]) == ("succeeded", 3 * len("monday-a.csv"))


ASK_TWICE = """
import json
from tocsin import Client

with Client() as client:
    run = client.run_workflow(client.get_named_job("import")["id"], {"day": 5})
    first = client.wait_workflow(run)
    print(json.dumps([first, client.wait_workflow(client.retry_workflow_run(first["id"]))]))
"""


def test_a_function_that_fails_stops_what_comes_after_it_in_the_retry_as_in_the_run(running: Running) -> None:
    done = running.type([sys.executable, "-c"], ASK_TWICE)
    first, again = json.loads(done.stdout.splitlines()[-1])
    states = {"find": "dead", "convert": "skipped", "total": "skipped", "apologise": "skipped"}
    for run in (first, again):
        assert run["state"] == "dead" and run["error"]["message"] == "find is dead"
        assert {node["name"]: node["state"] for node in run["nodes"]} == states
        assert run["nodes"][0]["error"]["class"] == "arguments"
    assert (first["retries"], again["retries"], again["id"]) == (0, 1, first["id"])
    assert first["nodes"][0]["run_id"] != again["nodes"][0]["run_id"]
