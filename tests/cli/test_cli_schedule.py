from __future__ import annotations

import json
from typing import Any

import pytest
from scripted import Reply, Script, Tocsin, problem

ANSWER = {
    "description": "at 09:00 on Monday through Friday (America/New_York)",
    "runs": ["2036-12-01T14:00:00.000000Z", "2036-12-02T14:00:00.000000Z"],
    "warnings": ["1,412 of your jobs share this minute"],
}


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (["0 9 * * 1-5", "--tz", "America/New_York"], {"cron": "0 9 * * 1-5", "timezone": "America/New_York"}),
        (["--text", "every day at noon", "--jitter", "5m"], {"text": "every day at noon", "jitter": "5m"}),
        (["--every", "5m", "--until", "2030-01-01T00:00:00Z"], {"every": "5m", "until": "2030-01-01T00:00:00Z"}),
        (["--rrule", "FREQ=DAILY"], {"rrule": "FREQ=DAILY"}),
        (["--interval", "R/2026-01-01/P1D"], {"interval": "R/2026-01-01/P1D"}),
    ],
)
def test_what_is_asked(script: Script, tocsin: Tocsin, words: list[str], sent: dict[str, Any]) -> None:
    script.on("POST", "/v1/schedules/preview", Reply(200, ANSWER))
    result = tocsin("schedule", "preview", "--json", "--count", "2", "--name", "nightly", *words)
    assert result.exit_code == 0, result.output
    assert script.asked[0].body == {"schedule": sent, "count": 2, "name": "nightly"}
    assert json.loads(result.stdout) == ANSWER


def test_people_read_words_instants_and_warnings(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/schedules/preview", Reply(200, ANSWER))
    result = tocsin("schedule", "preview", "0 9 * * 1-5", "--tz", "America/New_York")
    first, second, third = result.stdout.splitlines()
    assert first == ANSWER["description"]
    assert second.startswith("  Mon 2036-12-01 09:00:00 EST  2036-12-01T14:00:00.000000Z  in ") and "12-02" in third
    assert "warning: 1,412 of your jobs share this minute" in result.stderr


def test_one_kind_only_and_at_least_one(script: Script, tocsin: Tocsin) -> None:
    assert tocsin("schedule", "preview").exit_code == 2
    assert tocsin("schedule", "preview", "--tz", "UTC").exit_code == 2
    assert tocsin("schedule", "preview", "* * * * *", "--every", "5m").exit_code == 2
    assert script.asked == []


def test_a_refusal_says_how_to_write_it(script: Script, tocsin: Tocsin) -> None:
    script.on("POST", "/v1/schedules/preview", problem(422, "unclear_text", 'write "every day at 9:00"'))
    result = tocsin("schedule", "preview", "--text", "daily")
    assert result.exit_code == 1 and 'write "every day at 9:00"' in result.stderr
