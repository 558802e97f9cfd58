"""The worst schedules within the limits, in steps: reading, checking, describing, and a hundred instants of each.

A step is a call (tests/steps.py); 600,000 of them take about a fifth of a second.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.steps import at_most
from tocsin.errors import ApiProblem
from tocsin.model.graph import MOST_EDGES, MOST_NODES, Dependency, Graph, critical_path, starts
from tocsin.model.job import Schedule
from tocsin.model.preview import preview
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import timetable
from tocsin.model.strict import refuse_nul

NOW = datetime(2026, 11, 18, tzinfo=UTC)
MOST = 600_000
WEEK = "MO,TU,WE,TH,FR,SA,SU"


def numbers(end: int, start: int = 0) -> str:
    return ",".join(map(str, range(start, end)))


CLOCK = f"BYHOUR={numbers(24)};BYMINUTE={numbers(60)};BYSECOND={numbers(60)}"
WORST: list[dict[str, Any]] = [
    {"cron": "0 0 29 2 FRI"},
    {"cron": "0 0 29 2 */5"},
    {"cron": "* * * * * *"},
    {"cron": "0 0 L-30,LW,1W,31W 2 MON#5,FRIL"},
    {"cron": f"{numbers(60)} {numbers(24)} 29 2 */5"},
    {"cron": "0 0 29 2 FRI", "starting_at": "2990-01-01T00:00:00Z"},
    {"rrule": "FREQ=MONTHLY;INTERVAL=12;BYMONTH=2"},
    {"rrule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=30"},
    {"rrule": "FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=-30;UNTIL=99981231"},
    {"rrule": "FREQ=YEARLY;BYWEEKNO=53;BYMONTH=6"},
    {"rrule": "FREQ=YEARLY;BYDAY=MO;BYSETPOS=60"},
    {"rrule": "FREQ=DAILY;BYHOUR=1;BYSETPOS=5"},
    {"rrule": "FREQ=DAILY;INTERVAL=7;BYDAY=TU"},
    {"rrule": "FREQ=DAILY;INTERVAL=365;BYMONTH=6"},
    {"rrule": f"FREQ=YEARLY;BYDAY={WEEK};{CLOCK};BYSETPOS=366,-366"},
    {"rrule": f"FREQ=MONTHLY;BYDAY={WEEK};{CLOCK};BYSETPOS={numbers(100, 1)}"},
    {"rrule": f"FREQ=MINUTELY;BYSECOND={numbers(60)};BYSETPOS=61"},
    {"rrule": "FREQ=DAILY;COUNT=10000"},
    {"rrule": "FREQ=YEARLY;BYDAY=MO;BYMONTHDAY=13;BYMONTH=1,2,3;COUNT=10000"},
    {"rrule": "FREQ=SECONDLY;INTERVAL=86400;BYHOUR=3"},
    {"rrule": "FREQ=SECONDLY;INTERVAL=86399;BYHOUR=3;BYMINUTE=1;BYSECOND=1"},
    {"rrule": "FREQ=SECONDLY;INTERVAL=7919;BYHOUR=3;BYMINUTE=1;BYSECOND=1"},
    {"rrule": "FREQ=SECONDLY;INTERVAL=1000003;BYMONTH=2;BYHOUR=3;BYMINUTE=1;BYSECOND=1"},
    {"rrule": "FREQ=SECONDLY;BYYEARDAY=366;BYMONTH=6"},
    {"interval": "R1000000/1970-01-31/P1M1D"},
    {"interval": "R/1970-02-28T00:00:00Z/PT1S"},
    {"interval": "R1000000/P1D/2900-01-31"},
    {"text": "every 5 minutes between 9:00 and 17:00 on " + ", ".join(["monday"] * 100)},
    {"text": "at " + ", ".join(["9:00"] * 150)},
]


def schedule(**given_: Any) -> Schedule:
    return msgspec.convert(given_, Schedule, dec_hook=decode_scalar)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
@pytest.mark.parametrize("worst", WORST, ids=lambda worst: " ".join(worst.values())[:60])
def test_the_worst_schedules_take_bounded_steps(worst: dict[str, Any], zone: str) -> None:
    with at_most(MOST), contextlib.suppress(ApiProblem):
        preview(schedule(**worst, timezone=zone), NOW, 100, "tenant", "job")


@given(st.lists(st.sampled_from([b"\\\\", b"\\u0000", b"u0000", b"\\u0001", b"\\n", b"a", b"0"]), max_size=8))
def test_u0000_is_found_in_json_after_any_text(parts: list[bytes]) -> None:
    body = b'{"a":"' + b"".join(parts) + b'"}'
    try:
        refuse_nul(body)
    except ApiProblem:
        assert "\0" in msgspec.json.decode(body)["a"]
    else:
        assert "\0" not in msgspec.json.decode(body)["a"]


@pytest.mark.parametrize("part", [b"\\", b"\\\\u0000", b"\\" * 70 + b"u0000", b"u0000"])
def test_u0000_is_looked_for_in_few_passes(part: bytes) -> None:
    """Each pass over the eight megabytes is one C call."""
    with at_most(100), contextlib.suppress(ApiProblem):
        refuse_nul((part * (8_000_000 // len(part))) + b"\\u0000")


def chain(length: int) -> dict[str, list[Dependency]]:
    return {f"n{i}": [Dependency(job=f"n{i - 1}")] if i else [] for i in range(length)}


def wide(roots: int, joins: int) -> dict[str, list[Dependency]]:
    all_roots = [Dependency(job=f"r{i}") for i in range(roots)]
    return {f"r{i}": [] for i in range(roots)} | {f"n{i}": all_roots for i in range(joins)}


GRAPHS = {
    "one after another": chain(MOST_NODES),
    "as deep as may be": chain(1_000),
    "a ring": chain(MOST_NODES) | {"n0": [Dependency(job=f"n{MOST_NODES - 1}")]},
    "wide joins": wide(490, MOST_EDGES // 490 - 1),
    "one join": wide(MOST_NODES - 1, 1),
}


@pytest.mark.parametrize("parents", GRAPHS.values(), ids=GRAPHS)
def test_the_largest_graphs_take_bounded_steps(parents: dict[str, list[Dependency]]) -> None:
    with at_most(MOST), contextlib.suppress(ApiProblem):
        graph = Graph.of(parents)
        assert graph.depth and graph.roots
        starts(graph, dict.fromkeys(graph.order, "daily"))
        critical_path(graph.order, {n: [d.job for d in parents[n]] for n in parents}, dict.fromkeys(parents, 1))


def some(*choices: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(choices), min_size=1, max_size=4, unique=True).map(",".join)


RULES = st.builds(
    lambda freq, interval, parts, end: ";".join([f"FREQ={freq}", f"INTERVAL={interval}", *parts, *end]),
    st.sampled_from(["SECONDLY", "MINUTELY", "HOURLY", "DAILY", "WEEKLY", "MONTHLY", "YEARLY"]),
    st.sampled_from([1, 2, 7, 12, 52, 365, 599, 7919]),
    st.tuples(
        some("1", "2", "6", "12").map(lambda v: f"BYMONTH={v}"),
        some("1", "29", "30", "31", "-1", "-29", "-30").map(lambda v: f"BYMONTHDAY={v}"),
        some("MO", "FR", "5MO", "-5SU", "53WE").map(lambda v: f"BYDAY={v}"),
        some("1", "53", "-53").map(lambda v: f"BYWEEKNO={v}"),
        some("1", "366", "-366").map(lambda v: f"BYYEARDAY={v}"),
        some("0", "2", "3", "23").map(lambda v: f"BYHOUR={v}"),
        some("1", "5", "60", "366", "-366").map(lambda v: f"BYSETPOS={v}"),
    ).flatmap(lambda parts: st.lists(st.sampled_from(parts), max_size=4, unique=True)),
    st.sampled_from([(), ("COUNT=10000",), ("UNTIL=29991231",)]),
)


@given(RULES, st.sampled_from(["UTC", "Europe/Berlin", "Asia/Beirut"]))
@settings(max_examples=60, deadline=None)
def test_any_rule_is_checked_and_followed_in_bounded_steps(rule: str, zone: str) -> None:
    given_ = schedule(rrule=rule, timezone=zone)
    with at_most(2 * MOST), contextlib.suppress(ApiProblem):
        preview(given_, NOW, 10, "tenant", "job")
        table = timetable(given_, NOW)
        table.last_before(NOW + timedelta(days=366), NOW)
        table.count(NOW, NOW + timedelta(days=366))
