"""The job document: what decodes, what its defaults are, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tocsin.errors import InvalidInput, NotSupported
from tocsin.model.graph import Dependency
from tocsin.model.job import JobSpec, Schedule, check
from tocsin.model.scalars import decode_scalar, encode_scalar

PROCESS = {"kind": "process", "command": ["true"]}


def spec(**given: Any) -> JobSpec:
    text = msgspec.json.encode({"target": PROCESS} | given)
    return msgspec.json.decode(text, type=JobSpec, dec_hook=decode_scalar)


def test_the_defaults_are_those_of_the_contract() -> None:
    stored = msgspec.to_builtins(spec(schedule={"cron": "0 9 * * *"}), enc_hook=encode_scalar)
    assert stored["schedule"] | {"cron": None} == {
        **dict.fromkeys(("manual", "at", "delay", "cron", "every", "interval", "rrule", "text")),
        **{"timezone": "UTC", "starting_at": None, "until": None, "max_runs": None, "calendar": None, "jitter": None},
        "dst": {"gap": "next_valid", "overlap": "first"},
        "misfire": {"policy": "latest", "window": "PT1H", "max": 100},
    }
    assert stored["target"] == PROCESS | {"env": {}, "cwd": None, "stdin": None, "shell": False, "sandbox": False}
    assert stored["retry"] == {
        **{"max_attempts": 4, "backoff": "exponential", "delay": "PT1S", "max_delay": "PT1H", "multiplier": 2.0},
        **{"jitter": "full", "retry_on": [], "give_up_on": []},
    }
    assert {k: stored[k] for k in ("pool", "priority", "timeout", "overlap", "max_concurrency", "start_deadline")} == {
        **{"pool": "default", "priority": 500, "timeout": "PT1H", "overlap": "skip"},
        **{"max_concurrency": None, "start_deadline": None},
    }


def test_what_is_stored_reads_back_the_same() -> None:
    first = spec(name="a", schedule={"every": "5m"}, tags={"team": "x"}, timeout="90s")
    again = msgspec.convert(msgspec.to_builtins(first, enc_hook=encode_scalar), JobSpec, dec_hook=decode_scalar)
    assert again == first
    check(again)


@pytest.mark.parametrize(
    "given",
    [
        {"colour": "red"},
        {"target": {"kind": "process", "command": []}},
        {"target": {"kind": "teapot"}},
        {"target": {"kind": "python", "function": "os.system('x')"}},
        {"target": {"kind": "python", "function": ""}},
        {"priority": -1},
        {"priority": 1001},
        {"priority": True},
        {"priority": "5"},
        {"priority": 2**63},
        {"name": ""},
        {"name": "a" * 129},
        {"name": "a b"},
        {"name": "\u202eevil"},
        {"name": "рaypal"},
        # `$` in a pattern lets one line feed pass; `\Z` does not.
        {"name": "a\n"},
        {"retry": {"max_attempts": 0}},
        {"retry": {"max_attempts": 10**9}},
        {"retry": {"delay": "-1s"}},
        {"retry": {"multiplier": 0.5}},
        {"schedule": {"cron": "*" * 257}},
        {"schedule": {"cron": ""}},
        {"schedule": {"at": "2026-12-01T09:00:00"}},
        {"schedule": {"manual": False}},
        {"schedule": {"every": 5}},
        {"schedule": {"misfire": {"policy": "sometimes"}}},
        {"tags": {str(i): "x" for i in range(51)}},
        {"tags": {"a": 5}},
        {"overlap": "maybe"},
        {"max_concurrency": 0},
    ],
)
def test_a_wrong_shape_does_not_decode(given: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        spec(**given)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"schedule": {}}, "schedule"),
        ({"schedule": {"cron": "* * * * *", "every": "5m"}}, "schedule"),
        ({"timeout": "PT0S"}, "timeout"),
        ({"timeout": "P8D"}, "timeout"),
        ({"start_deadline": "PT0S"}, "start_deadline"),
        ({"retry": {"max_delay": "P8D"}}, "retry.max_delay"),
        ({"tags": {"a": "x" * 257}}, "tags.a"),
        ({"tags": {"a": "\x1b[31m"}}, "tags.a"),
        ({"tags": {"a b": "x"}}, "tags.a b"),
        ({"target": {"kind": "process", "command": ["a\0b"]}}, "target.command"),
        ({"target": {"kind": "process", "command": [""]}}, "target.command[0]"),
        ({"target": {"kind": "process", "command": "rm -rf /"}}, "target.command"),
        ({"target": {"kind": "process", "command": " ", "shell": True}}, "target.command[0]"),
        ({"target": {"kind": "process", "command": "a\0b", "shell": True}}, "target.command"),
        ({"target": PROCESS | {"stdin": "a\0b"}}, "target.stdin"),
        ({"target": PROCESS | {"sandbox": True, "cwd": "/"}}, "target.cwd"),
        ({"target": {"kind": "process", "command": ["x" * 131_073]}}, "target.command"),
        ({"target": PROCESS | {"env": {"LD_PRELOAD": "x"}}}, "target.env.LD_PRELOAD"),
        ({"target": PROCESS | {"env": {"PATH": "x"}}}, "target.env.PATH"),
        ({"target": PROCESS | {"env": {"TOCSIN_RUN_ID": "x"}}}, "target.env.TOCSIN_RUN_ID"),
        ({"target": PROCESS | {"env": {"A=B": "x"}}}, "target.env.A=B"),
        ({"target": PROCESS | {"env": {"A": "x\0"}}}, "target.env.A"),
        ({"target": PROCESS | {"env": {"A": "x" * 65_537}}}, "target.env"),
    ],
)
def test_a_wrong_meaning_is_named(given: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check(spec(**given))
    assert not isinstance(caught.value, NotSupported)
    assert [e["path"] for e in caught.value.errors or []] == [path]


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        check(spec(timeout="PT0S", start_deadline="PT0S", schedule={}))
    assert {e["path"] for e in caught.value.errors or []} == {"timeout", "start_deadline", "schedule"}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"notify": [{}]}, "notify"),
    ],
)
def test_what_is_not_built_is_said_not_ignored(given: dict[str, Any], path: str) -> None:
    with pytest.raises(NotSupported) as caught:
        check(spec(**given))
    assert [e["path"] for e in caught.value.errors or []] == [path]


@pytest.mark.parametrize(
    ("schedule", "once"),
    [
        (None, True),
        ({"at": "2026-12-01T09:00:00Z"}, True),
        ({"delay": "5m"}, True),
        ({"cron": "* * * * *"}, False),
        ({"every": "5m"}, False),
        ({"manual": True}, False),
        ({"text": "tomorrow at noon"}, True),
        ({"text": "in 10 minutes"}, True),
        ({"text": "every day at noon"}, False),
        ({"interval": "R1/2026-01-01/P1D"}, False),
        ({"rrule": "FREQ=DAILY;COUNT=1"}, False),
    ],
)
def test_which_jobs_are_completed_by_one_run(schedule: dict[str, Any] | None, once: bool) -> None:
    made = spec(schedule=schedule)
    check(made)
    assert made.once == once


def test_parents_are_written_in_full_and_start_the_job() -> None:
    made = spec(depends_on=["a", {"job": "b", "on": "failure"}])
    assert made.depends_on == [Dependency(job="a"), Dependency(job="b", on="failure")] == made.parents
    assert made.schedule == Schedule(manual=True) and not made.once
    assert spec(**msgspec.json.decode(msgspec.json.encode(made, enc_hook=encode_scalar))) == made
    with pytest.raises(InvalidInput) as caught:
        check(spec(depends_on=["a"], schedule={"cron": "* * * * *"}))
    assert [e["path"] for e in caught.value.errors or []] == ["schedule"]
