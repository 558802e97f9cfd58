"""Query parameters with a fixed set of values: any other value is refused, with the allowed ones, on every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import pytest
from typer.testing import CliRunner

from tests.conftest import Api
from tocsin.cli import shared
from tocsin.cli.main import app
from tocsin.model import backfill, circuit
from tocsin.model.states import FINAL, JOB_STATES, LIVE, OUTCOMES
from tocsin.node.server.openapi import document
from tocsin.node.server.routes import ROUTES

# Parameters with these names are enumerations on every route.
ENUMERATED = {"state", "outcome", "by", "format", "type", "mode", "stream"}


class Choice(NamedTuple):
    method: str
    path: str
    name: str
    values: list[str]


def parameters() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document(ROUTES)["paths"].items():
        for method, operation in methods.items():
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    yield method.upper(), path, parameter


def enumerated() -> list[Choice]:
    filled = {"id": "019a2b3c-4d5e-7f60-8a1b-2c3d4e5f6071", "name": "x"}
    return [
        Choice(method, path.format(**filled), parameter["name"], parameter["schema"]["enum"])
        for method, path, parameter in parameters()
        if "enum" in parameter["schema"]
    ]


async def test_an_unknown_value_is_refused_with_those_there_are(still_api: Api) -> None:
    found = enumerated()
    assert {choice.name for choice in found} == ENUMERATED and len(found) >= 16
    for choice in found:
        answer = await still_api.call(choice.method, choice.path, params={choice.name: "nope"}, expect=422)
        [error] = answer["errors"]
        assert error["path"] == choice.name, choice
        assert error["message"] == f"must be one of {', '.join(choice.values)}", choice


async def test_every_value_that_is_offered_is_taken(still_api: Api) -> None:
    lists = [choice for choice in enumerated() if choice.name in ("state", "outcome", "by")]
    for choice in lists:
        for value in choice.values:
            reply = await still_api.http.request(choice.method, choice.path, params={choice.name: value})
            assert reply.status_code in (200, 404), (choice, value, reply.text)


def test_the_document_enumerates_what_is_enumerated() -> None:
    for method, path, parameter in parameters():
        assert ("enum" in parameter["schema"]) == (parameter["name"] in ENUMERATED), (method, path, parameter["name"])


async def test_an_empty_value_is_none(still_api: Api) -> None:
    assert (await still_api.get("/v1/jobs", params={"state": ""}))["items"] == []


@pytest.mark.parametrize(
    ("offered", "values"),
    [
        (shared.JobState, JOB_STATES),
        (shared.RunState, (*LIVE, *FINAL)),
        (shared.Outcome, OUTCOMES),
        (shared.BackfillState, get_args(backfill.State)),
        (shared.CircuitState, get_args(circuit.State)),
    ],
)
def test_the_command_line_takes_the_same_values(offered: Any, values: tuple[str, ...]) -> None:
    assert get_args(offered) == values


@pytest.mark.parametrize(
    ("command", "value"),
    [
        ("job list --state", "completed"),
        ("run list --state", "skipped"),
        ("run list --outcome", "timeout"),
        ("backfill list --state", "completed"),
        ("circuit list --state", "half_open"),
        ("workflow list --state", "paused"),
    ],
)
def test_the_command_line_names_the_values(command: str, value: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "nope"])
    assert done.exit_code == 2 and value in done.output and "nope" in done.output
