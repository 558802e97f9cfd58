"""Jobs changed from the command line, on a real server; what only a broken server does is scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import typer
from scripted import Reply, Script, Tocsin, problem
from typer.testing import Result

from tests.conftest import Cluster
from tocsin.cli import job as command
from tocsin.cli import jobspec

JOB_ID = "01981f7e-0000-7000-8000-000000000001"
TRUE = {"kind": "process", "command": ["true"]}
MANUAL = {"schedule": {"manual": True}, "target": TRUE}

Type = Callable[..., Coroutine[Any, Any, Result]]


@pytest.fixture
def type_(served: str, cluster: Cluster, tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Type:
    """Type a command line for the real server."""
    monkeypatch.setenv("TOCSIN_URL", served)
    monkeypatch.setenv("TOCSIN_KEY", cluster.keys["key"])
    monkeypatch.setenv("TOCSIN_HOME", str(tmp_path))

    async def run(*args: str, exit: int = 0, input: Any = None) -> Result:
        text = input if input is None or isinstance(input, str) else json.dumps(input)
        result: Result = await asyncio.to_thread(tocsin, *args, input=text)
        assert result.exit_code == exit, result.output
        return result

    return run


async def shown(type_: Type, name: str) -> dict[str, Any]:
    return json.loads((await type_("job", "show", name, "--json")).stdout)  # type: ignore[no-any-return]


# ── update ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_flags_sets_and_a_file_are_one_patch(type_: Type) -> None:
    await type_("job", "create", "--name", "a", "--cron", "0 3 * * *", "--tag", "x=1", "--tag", "y=2", "--", "true")
    flags = ["--priority", "9", "--tag", "z=3", "--set", "tags.x=null", "--set", 'retry.delay="5s"', "--file", "-"]
    result = await type_("job", "update", "a", *flags, input={"timeout": "PT5M", "tags": {"y": "two"}})
    assert result.stdout.startswith("changed a ")
    assert " to version 2, next run " in result.stdout
    job = await shown(type_, "a")
    assert (job["priority"], job["timeout"], job["retry"]["delay"]) == (9, "PT5M", "PT5S")
    assert job["tags"] == {"y": "two", "z": "3"}
    assert job["schedule"]["cron"] == "0 3 * * *"


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        (["--every", "5m"], {"every": "PT5M", "cron": None, "timezone": "Europe/Paris"}),
        (["--text", "every day at 9:00"], {"text": "every day at 9:00", "cron": None, "timezone": "Europe/Paris"}),
        (["--manual"], {"manual": True, "cron": None}),
        (["--tz", "UTC"], {"cron": "0 3 * * *", "timezone": "UTC"}),
    ],
)
async def test_a_kind_of_schedule_takes_the_place_of_the_other(type_: Type, flags: list[str], schedule: Any) -> None:
    await type_("job", "create", "--name", "a", "--cron", "0 3 * * *", "--tz", "Europe/Paris", "--", "true")
    await type_("job", "update", "a", *flags)
    found = (await shown(type_, "a"))["schedule"]
    assert {name: found[name] for name in schedule} == schedule


async def test_a_target_takes_the_place_of_another_kind_and_keeps_what_is_its_own(type_: Type) -> None:
    await type_("job", "create", "--name", "a", "--manual", "--env", "X=1", "--cwd", "/tmp", "--", "true")
    await type_("job", "update", "a", "--env", "Y=2", "--", "false")
    assert (await shown(type_, "a"))["target"]["env"] == {"X": "1", "Y": "2"}
    await type_("job", "update", "a", "--env", "Y=3")
    target = (await shown(type_, "a"))["target"]
    assert (target["command"], target["env"], target["cwd"]) == (["false"], {"X": "1", "Y": "3"}, "/tmp")
    await type_("job", "update", "a", "--python", "reports.daily", "--kwargs", '{"day": 1}')
    await type_("job", "update", "a", "--kwargs", '{"hour": 2}')
    assert (await shown(type_, "a"))["target"] == {
        "kind": "python",
        "function": "reports.daily",
        "args": [],
        "kwargs": {"day": 1, "hour": 2},
    }
    refused = await type_("job", "update", "a", "--env", "X=1", exit=1)
    assert "env" in refused.stderr


async def test_what_changes_nothing_says_so_and_a_version_guards(type_: Type) -> None:
    await type_("job", "create", "--name", "a", "--manual", "--", "true")
    assert (await type_("job", "update", "a", "--priority", "500")).stdout.startswith("unchanged a ")
    job_id = (await type_("job", "update", "a", "--priority", "9", "--if-match", "1", "--ids")).stdout.strip()
    refused = await type_("job", "update", job_id, "--priority", "8", "--if-match", "1", exit=1)
    assert refused.stderr == (
        "tocsin: the job is at version 2, not 1 [precondition_failed]; `tocsin job show` shows it as it is now\n"
    )
    for verb in ("pause", "resume", "cancel", "delete"):
        await type_("job", verb, "a", "--if-match", "1", exit=1)
    assert (await type_("job", "delete", "a", "--if-match", "2")).stdout == f"deleted a {job_id}\n"
    assert "job_cancelled" in (await type_("job", "update", "a", "--priority", "8", exit=1)).stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "say what to change"),
        (["--set", "priority"], "is not path=json"),
        (["--set", "retry..delay=1"], "is not path=json"),
        (["--set", "timeout=5m"], "--set 'timeout=\"5m\"'"),
        (["--set", "priority=NaN"], "NaN is no number"),
        (["--set", "priority=1", "--priority", "2"], "priority is given twice"),
        (["--set", "retry=null", "--set", "retry.delay=null"], "retry is given twice"),
        (["--cron", "* * * * *", "--every", "5m"], "give only one of"),
        (["--python", "f", "--", "true"], "give only one of"),
        (["--file", "-", "--priority", "1"], "priority is given twice"),
        (["--priority", "1", "--if-match", "0"], "--if-match"),
    ],
)
def test_a_patch_that_is_none_is_told_before_anything_is_sent(
    script: Script, tocsin: Tocsin, args: list[str], words: str
) -> None:
    result = tocsin("job", "update", JOB_ID, *args, input='{"priority": 5}')
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert script.asked == []


# ── put ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_put_says_what_became_of_it(type_: Type, tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(MANUAL))
    assert (await type_("job", "put", "a", "--file", str(path))).stdout.startswith("created a ")
    assert ", version 1" in (await type_("job", "put", "a", "--file", str(path))).stdout
    changed = await type_("job", "put", "a", "--file", "-", "--if-match", "1", input=MANUAL | {"priority": 9})
    assert changed.stdout.startswith("changed a ")
    assert "to version 2" in changed.stdout
    await type_("job", "put", "a", "--file", str(path), "--if-match", "1", exit=1)
    await type_("job", "pause", "a")
    assert json.loads((await type_("job", "put", "a", "--file", str(path), "--json")).stdout)["version"] == 3
    await type_("job", "delete", "a")
    assert (await type_("job", "put", "a", "--file", str(path))).stdout.startswith("created a ")


@pytest.mark.parametrize("content", ["[1]", "{", '{"a": 1, "a": 2}', "[" * 100_000, '{"priority": Infinity}'])
def test_a_file_is_read_as_strictly_as_the_server_reads(script: Script, tocsin: Tocsin, content: str) -> None:
    for args in (["put", "a"], ["update", JOB_ID], ["create"]):
        result = tocsin("job", *args, "--file", "-", input=content)
        assert result.exit_code == 2, result.output
        assert "Invalid value for --file" in result.stderr
    assert script.asked == []


# ── lists ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BATCH", 2)


async def test_a_list_is_stored_together_or_not_at_all(type_: Type) -> None:
    jobs = [MANUAL | {"name": f"n{i}"} for i in range(3)]
    result = await type_("job", "create", "--file", "-", input=jobs)
    assert [line.split()[1] for line in result.stdout.splitlines()] == ["NAME", "n0", "n1", "n2"]
    again = [MANUAL | {"name": "n3"}, MANUAL | {"name": "n0"}]
    refused = await type_("job", "create", "--file", "-", input=again, exit=1)
    assert refused.stderr == ("tocsin: jobs[1].name: a job named 'n0' exists already; nothing is stored [name_taken]\n")
    assert refused.stdout == ""
    assert len((await type_("job", "list", "--ids")).stdout.split()) == 3


@pytest.mark.usefixtures("small_batches")
async def test_a_long_list_goes_in_batches_and_says_where_it_stopped(type_: Type) -> None:
    jobs: list[dict[str, Any]] = [MANUAL | {"name": f"n{i}"} for i in range(7)]
    jobs[5] = jobs[5] | {"priority": "high"}
    refused = await type_("job", "create", "--file", "-", "--json", input=jobs, exit=1)
    assert [job["name"] for job in json.loads(refused.stdout)["items"]] == ["n0", "n1", "n2", "n3"]
    assert "7 jobs go 2 at a time; each batch is stored whole or not at all\n" in refused.stderr
    assert "jobs[5].priority: " in refused.stderr
    assert "the first 4 of 7 jobs are stored, none after them [invalid_input]" in refused.stderr
    rest = await type_("job", "create", "--file", "-", "--ids", input=[MANUAL] * 5)
    assert len(rest.stdout.split()) == 5
    assert len((await type_("job", "list", "--ids")).stdout.split()) == 9


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    ("reply", "exit"), [(problem(500, "oops"), 1), (Reply(200, b"<html>"), 3), (problem(409, "in_flight"), 1)]
)
def test_without_a_clear_answer_it_does_not_say_that_nothing_is_stored(
    script: Script, tocsin: Tocsin, reply: Reply, exit: int
) -> None:
    made = Reply(201, {"items": [{"id": "j1"}, {"id": "j2"}]})
    script.on("POST", "/v1/jobs/batch", made, reply)
    result = tocsin("job", "create", "--file", "-", "--ids", input=json.dumps([MANUAL] * 3))
    assert result.exit_code == exit
    assert result.stdout == "j1\nj2\n"
    assert "the first 2 of 3 jobs are stored, whether 1 more are stored is not known" in result.stderr


@pytest.mark.parametrize("content", ["[]", "[{}, 3]", "3"])
def test_a_list_of_something_else(script: Script, tocsin: Tocsin, content: str) -> None:
    assert tocsin("job", "create", "--file", "-", input=content).exit_code == 2
    assert script.asked == []


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_versions_tell_what_each_changed(type_: Type) -> None:
    await type_("job", "create", "--name", "a", "--cron", "0 3 * * *", "--", "true")
    await type_("job", "update", "a", "--every", "5m", "--tag", "x=1")
    await type_("job", "update", "a", "--python", "f")
    header, *rows = (await type_("job", "versions", "a")).stdout.splitlines()
    assert header.split() == ["VERSION", "SINCE", "CHANGED"]
    assert [(row.split()[0], row.partition(")")[2].strip()) for row in rows] == [
        ("3", "target"),
        ("2", "schedule.cron, schedule.every, tags.x"),
        ("1", "created"),
    ]
    two = await type_("job", "versions", "a", "--limit", "2", "--json")
    found = json.loads(two.stdout)
    assert [(v["version"], v["changed"]) for v in found["items"]] == [
        (3, ["target"]),
        (2, ["schedule.cron", "schedule.every", "tags.x"]),
    ]
    assert found["more"] is True


async def test_two_versions_are_compared(type_: Type) -> None:
    await type_("job", "create", "--name", "a", "--cron", "0 3 * * *", "--", "true")
    await type_("job", "update", "a", "--every", "5m", "--", "echo", "\x1b[31mred")
    await type_("job", "update", "a", "--cron", "0 3 * * *", "--", "true")
    assert (await type_("job", "versions", "a", "--diff", "1", "2")).stdout.splitlines() == [
        *("schedule.cron", '  - "0 3 * * *"'),
        *("schedule.every", '  + "PT5M"'),
        *("target.command", '  - ["true"]', '  + ["echo", "\\u001b[31mred"]'),
    ]
    back = json.loads((await type_("job", "versions", "a", "--diff", "2", "1", "--json")).stdout)
    assert (back["from"], back["to"]) == (2, 1)
    assert {"path": "schedule.every", "from": "PT5M", "to": None} in back["changes"]
    assert "are the same" in (await type_("job", "versions", "a", "--diff", "1", "3")).stdout
    assert (
        "there is no version 9; the job is at 3"
        in (await type_("job", "versions", "a", "--diff", "9", "1", exit=2)).stderr
    )


# ── the pure parts ───────────────────────────────────────────────────────────────────────────────────────────────


def test_patches_come_together_only_where_both_are_objects() -> None:
    assert jobspec.together({"a": {"b": None}, "c": 1}, {"a": {"d": 2}}) == {"a": {"b": None, "d": 2}, "c": 1}
    for one, other in ([{"a": 1}, {"a": 1}], [{"a": None}, {"a": {}}], [{"a": {"b": 1}}, {"a": {"b": {}}}]):
        with pytest.raises(typer.BadParameter, match="given twice"):
            jobspec.together(one, other)


def test_nothing_and_null_are_no_difference() -> None:
    assert list(jobspec.changes({"a": None, "b": {"c": 1}}, {"b": {"c": 1, "d": None}})) == []
    assert list(jobspec.changes({"b": {"c": [1]}}, {"b": {"c": [2]}, "e": 0})) == [
        {"path": "b.c", "from": [1], "to": [2]},
        {"path": "e", "from": None, "to": 0},
    ]
