"""The engine beside the oracle around some moves of the clock; `make test-time` goes through all of them."""

from __future__ import annotations

from datetime import date
from functools import cache
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.time.compare import SEED, compare, differences
from tests.time.expressions import ANY_EXPRESSION, EXPRESSIONS
from tests.time.oracle import Move, Window, distinct_moves, moves_of, zones
from tocsin.model import cron

DAY = 86_400
MOVES = distinct_moves()
SAMPLE = Random(4).sample(MOVES, 16)
window = cache(Window)


def first_move(zone: str, since: date) -> Move:
    return next(move for move in moves_of(zone) if move.at > (since.toordinal() - date(1970, 1, 1).toordinal()) * DAY)


SPRING, AUTUMN = (first_move("America/New_York", date(2026, month, 1)) for month in (1, 9))
ODD = [
    first_move("Pacific/Apia", date(2011, 12, 1)),  # a day left out
    first_move("Africa/Monrovia", date(1970, 1, 1)),  # off the minute
    first_move("Australia/Lord_Howe", date(2026, 1, 1)),  # half an hour back
    first_move("Australia/Lord_Howe", date(2026, 9, 1)),  # half an hour forward
    first_move("America/St_Johns", date(2010, 9, 1)),  # back over midnight
    first_move("America/St_Johns", date(2010, 1, 1)),  # forward just after midnight
    first_move("Africa/Cairo", date(2026, 1, 1)),  # forward at midnight
    first_move("Africa/Cairo", date(2026, 9, 1)),  # back at midnight
]


@pytest.mark.parametrize("move", ODD + SAMPLE, ids=str)
def test_agrees_with_looking_at_every_minute(move: Move) -> None:
    results = list(differences(Window(move), Random(move.at)))
    assert [what for what in results if what] == []
    assert len(results) > 3 * len(EXPRESSIONS)


@given(
    expression=ANY_EXPRESSION,
    move=st.sampled_from(ODD + SAMPLE[:4]),
    gap=st.sampled_from(["next_valid", "skip"]),
    overlap=st.sampled_from(["first", "second", "both"]),
)
@settings(max_examples=100)
def test_agrees_for_any_expression(expression: str, move: Move, gap: str, overlap: str) -> None:
    try:
        text = cron.resolve(expression, SEED)
    except cron.NeverFires:
        return
    assert [what for what in compare(window(move), text, gap, overlap, Random(1)) if what] == []


def test_there_are_as_many_moves_and_expressions_as_were_asked_for() -> None:
    assert len(MOVES) > 4_500
    assert len(set(EXPRESSIONS)) == len(EXPRESSIONS) >= 200


def test_moves_are_days_apart_and_never_longer_than_a_day() -> None:
    # The engine relies on it: a tzdata in which it does not hold must not go unnoticed.
    for zone in zones():
        moves = moves_of(zone)
        assert all(later.at - earlier.at > 3 * DAY for earlier, later in pairwise(moves)), zone
        assert all(abs(move.after - move.before) <= DAY for move in moves), zone


# ── a lie is found ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("move", "expression", "rules", "lie"),
    [
        (SPRING, "30 2 * * *", ("next_valid", "first"), ("skip", "first")),
        (SPRING, "30 2 * * *", ("skip", "first"), ("next_valid", "first")),
        (AUTUMN, "30 1 * * *", ("skip", "first"), ("skip", "second")),
        (AUTUMN, "0-59 1 * * *", ("skip", "both"), ("skip", "first")),
        (AUTUMN, "0-59 0-59 1 * * *", ("skip", "second"), ("skip", "first")),
    ],
)
def test_a_wrong_rule_is_found(
    move: Move, expression: str, rules: tuple[str, str], lie: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = window(move)
    assert not any(compare(at, expression, *rules, Random(1)))
    honest = cron.compile_cron
    monkeypatch.setattr(cron, "compile_cron", lambda text, name, *_: honest(text, name, *lie))
    assert any(compare(at, expression, *rules, Random(1)))


@pytest.mark.parametrize("expression", ["30 2 * * *", "* * * * *", "*/10 * * * * *"])
@pytest.mark.parametrize("word", ["next_after", "last_before", "count"])
def test_an_answer_that_is_off_by_one_is_found(expression: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = getattr(cron.CronDays, word)

    def lie(*asked: object) -> object:
        answer = honest(*asked)
        return answer + 1 if word == "count" else answer and honest(asked[0], answer, *asked[2:])

    monkeypatch.setattr(cron.CronDays, word, lie)
    assert any(compare(window(ODD[0]), expression, "next_valid", "first", Random(1)))
