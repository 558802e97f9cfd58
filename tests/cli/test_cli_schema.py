"""What is done to the database itself: what the commands hand over, and how they tell what came of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from scripted import Tocsin

from tocsin.flow.restored import Restored
from tocsin.node import assemble
from tocsin.store.migrate import Known, Migrated, Older, Status

OLD = Older("web-1:8470", "0.1.0", "0009_late_rows")


def given(monkeypatch: pytest.MonkeyPatch, function: str, answer: Any) -> list[dict[str, Any]]:
    """Put a function that only remembers its calls in the place of one that works on a database."""
    calls: list[dict[str, Any]] = []

    def remember(settings: Any, **how: Any) -> Any:
        calls.append({"url": settings.database_url} | how)
        return answer

    monkeypatch.setattr(assemble, function, remember)
    return calls


@pytest.mark.parametrize(
    ("done", "told"),
    [
        (Migrated(["0001_core"], [], []), "applied 0001_core\n"),
        (Migrated([], [], []), "the schema is up to date\n"),
        (Migrated([], ["0014_less"], [OLD]), "0014_less waits until older servers have gone: web-1:8470 (0.1.0)\n"),
    ],
)
def test_migrate(tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, done: Migrated, told: str) -> None:
    calls = given(monkeypatch, "migrate", done)
    assert tocsin("migrate", "--database", "postgresql://db/x").stdout == told
    shown = json.loads(tocsin("migrate", "--post", "--json").stdout)
    assert (shown["applied"], shown["waiting"]) == (done.applied, done.waiting)
    assert [call["post"] for call in calls] == [False, True] and calls[0]["url"] == "postgresql://db/x"


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
def test_status_and_check(tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch, ready: bool, code: int) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    known = [Known("0001_core", "pre", at), Known("0014_less", "post", None)]
    given(monkeypatch, "migration_status", Status(known, [OLD], ready))
    listed = tocsin("migrate", "--status")
    assert listed.exit_code == 0 and "web-1:8470 (0.1.0)" in listed.stdout
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert [line[:2] for line in lines[1:3]] == [["0001_core", "pre"], ["0014_less", "post"]]
    assert lines[2][2] == "pending" and ("cannot work" in listed.stdout) is not ready
    checked = tocsin("migrate", "--check", "--json")
    assert checked.exit_code == code and json.loads(checked.stdout)["ready"] is ready


def test_restored_asks_before_it_does_anything(tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = given(monkeypatch, "restored", Restored(320, 3, 17, ["web-1:8470"]))
    refused = tocsin("restored", input="n\n")
    assert refused.exit_code == 1 and "Every worker is declared gone" in refused.output and not calls
    agreed = tocsin("restored", "--database", "postgresql://db/x", input="y\n")
    assert agreed.exit_code == 0 and [call["url"] for call in calls] == ["postgresql://db/x"]
    for told in ("epoch 320", "3 workers", "17 runs", "web-1:8470"):
        assert told in agreed.stdout
    shown = json.loads(tocsin("restored", "--yes", "--json").stdout)
    assert shown == {"epoch": 320, "workers": 3, "runs": 17, "servers": ["web-1:8470"]}


def test_the_option_wins_over_the_environment(tocsin: Tocsin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://db/one")
    calls = given(monkeypatch, "migrate", Migrated([], [], []))
    assert tocsin("migrate").exit_code == tocsin("migrate", "--database", "postgresql://db/two").exit_code == 0
    assert [call["url"] for call in calls] == ["postgresql://db/one", "postgresql://db/two"]
