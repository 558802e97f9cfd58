"""`tocsin logs search`: what it asks for, and lines that do no harm."""

import json
from typing import Any

from scripted import Script, Tocsin

RUN_ID = "01981f7e-0000-7000-8000-0000000000aa"


def line(text: str) -> dict[str, Any]:
    return {"run_id": RUN_ID, "ts": "2026-12-01T09:00:00.000000Z", "text": text, "seq": 1}


def test_a_search_goes_on_until_it_has_enough(script: Script, tocsin: Tocsin) -> None:
    script.on(
        "GET",
        "/v1/logs/search",
        {"items": [], "next_cursor": "s.1"},
        {"items": [line("a\x1b[31mb"), line("c")], "next_cursor": "s.2"},
    )
    asked = ["logs", "search", "pay*", '"the end"', "--level", "error", "--tag", "team=a", "--limit", "2"]
    result = tocsin(*asked)
    assert [text.partition(RUN_ID)[2] for text in result.stdout.splitlines()] == ["  ab", "  c"]
    first, second = (a.query for a in script.asked)
    assert first == {"q": 'pay* "the end"', "level": "error", "tag": "team:a", "limit": "2"}
    assert second["cursor"] == "s.1"
    assert "there may be more" in result.stderr


def test_a_search_that_finds_nothing_says_so(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/logs/search", {"items": [], "next_cursor": None})
    result = tocsin("logs", "search", "pay*")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "no such line\n")


def test_documents_a_line(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/logs/search", {"items": [line("a"), line("b")], "next_cursor": None})
    told = [json.loads(text) for text in tocsin("logs", "search", "--run", RUN_ID, "--json").stdout.splitlines()]
    assert told == [line("a"), line("b")]
    assert script.asked[0].query["run"] == RUN_ID
