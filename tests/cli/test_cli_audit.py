"""`tocsin audit`."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from scripted import Script, Tocsin

RECORD = {
    "seq": 2,
    "at": "2026-12-01T09:00:00.000000Z",
    "actor": "key:ops",
    "key_id": None,
    "action": "job.pause",
    "target": "job:01a1",
    "detail": {"reason": 'a "quoted", reason'},
    "before": None,
    "after": None,
    "address": "192.0.2.7",
    "request_id": "deploy-17",
    "hash": "ab" * 32,
}
FIRST = RECORD | {"seq": 1, "action": "job.create", "detail": None}
PIECE: dict[str, Any] = {
    "ok": True,
    "records": 2,
    "checked": 1,
    "unsealed": 0,
    "findings": [],
    "anchors": 1,
    "signed_anchors": 0,
    "anchored_seq": 1,
    "anchored_at": "2026-12-01T09:00:10.000000Z",
    "lost_by_restores": [],
    "next_cursor": None,
}


def test_records_are_listed_and_narrowed(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/audit", {"items": [RECORD, FIRST], "next_cursor": None})
    shown = tocsin("audit", "list", "--action", "job.pause", "--from", "2026-12-01T00:00:00Z").stdout
    assert "key:ops" in shown and "job.pause" in shown and "192.0.2.7" in shown
    asked = script.asked[-1].query
    assert (asked["action"], asked["from"]) == ("job.pause", "2026-12-01T00:00:00Z")


def test_records_are_exported_page_after_page(script: Script, tocsin: Tocsin) -> None:
    pages: list[tuple[list[dict[str, Any]], str | None]] = [([RECORD], "2"), ([], "2"), ([FIRST], None)]
    script.on("GET", "/v1/audit", *({"items": items, "next_cursor": after} for items, after in pages))
    lines = tocsin("audit", "export").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [RECORD, FIRST]


def test_csv_keeps_what_json_has(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/audit", {"items": [RECORD, FIRST], "next_cursor": None})
    pause, create = csv.DictReader(io.StringIO(tocsin("audit", "export", "--format", "csv").stdout))
    assert list(pause) == list(RECORD)
    assert json.loads(pause["detail"]) == RECORD["detail"] and create["detail"] == ""
    assert pause["request_id"] == "deploy-17"


def test_a_chain_is_proved_to_its_end(script: Script, tocsin: Tocsin) -> None:
    script.on("GET", "/v1/audit/verify", PIECE | {"next_cursor": "1.x"}, PIECE | {"anchored_seq": 2})
    done = tocsin("audit", "verify")
    assert done.exit_code == 0
    assert "2 records, held to 2 anchors, up to record 2" in done.stdout and "nobody has touched them" in done.stdout
    assert script.asked[-1].query["cursor"] == "1.x"


def test_what_is_wrong_is_named_and_the_command_fails(script: Script, tocsin: Tocsin) -> None:
    finding = {"kind": "changed", "seq": 2, "id": 9, "what": "record 2 is not what was sealed"}
    piece = PIECE | {"ok": False, "findings": [finding]}
    script.on("GET", "/v1/audit/verify", piece)
    done = tocsin("audit", "verify")
    assert done.exit_code == 1 and "changed: record 2 is not what was sealed" in done.stdout
    done = tocsin("audit", "verify", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and not told["ok"] and told["findings"] == [finding] and told["checked"] == 1
