"""The worst input within the limits, in steps: schedules, graphs, templates, queries, tokens, bodies, maps, scopes.

A step is a call (tests/steps.py); 600,000 of them take about a fifth of a second.
"""

from __future__ import annotations

import base64
import contextlib
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.steps import at_most
from tocsin.errors import ApiProblem, BadRequest
from tocsin.flow.report import weigh
from tocsin.flow.search import parse_cursor
from tocsin.flow.shared.jobs import within_scope
from tocsin.flow.shared.joins import Mapped, elements_of
from tocsin.flow.trail import Mark
from tocsin.model.access import MOST_STARS, Identity, Scope
from tocsin.model.autoscale import Sample, load_of
from tocsin.model.estimate import ahead_of
from tocsin.model.graph import MOST_EDGES, MOST_NODES, Dependency, Graph, critical_path, starts
from tocsin.model.httpcall import MOST_PLACEHOLDERS, BadCall, call_of, wrong_call
from tocsin.model.job import JobSpec, Schedule
from tocsin.model.limits import LONGEST_KEY, rendered
from tocsin.model.logsearch import Query
from tocsin.model.oidc import MOST_TOKEN, Issuer, Refused, Rule, read
from tocsin.model.preview import preview
from tocsin.model.scalars import decode_scalar
from tocsin.model.schedule import timetable
from tocsin.model.strict import MOST_LEVELS, refuse_heavy, refuse_nul, refuse_odd
from tocsin.model.targets import HttpTarget
from tocsin.model.workflow import MOST_MAPPED, BadMap, Map
from tocsin.node.server.http import cursor_of
from tocsin.node.server.worker_routes import _claim, _logs, _notes, _register, _report
from tocsin.wire import Finished
from tocsin.worker.runner.run import repacked

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


# ── templates ────────────────────────────────────────────────────────────────────────────────────────────────────────


def http(**more: Any) -> HttpTarget:
    return msgspec.convert({"kind": "http", "url": "https://example.com/", **more}, HttpTarget)


LONG = {"a": "ü" * 4_000_000}
REPEATED = {
    "a text": http(body="{args.a}" * MOST_PLACEHOLDERS),
    "texts": http(body=["{args.a}"] * MOST_PLACEHOLDERS),
    "inside texts": http(body=["x{args.a}"] * MOST_PLACEHOLDERS),
    "headers": http(headers={f"x{i}": "{args.a}" * 20 for i in range(100)}),
    "url": http(url="https://example.com/" + "{args.a}" * 1_000),
}


@pytest.mark.parametrize("target", REPEATED.values(), ids=REPEATED)
def test_a_template_that_repeats_a_long_argument_is_refused_in_few_steps(target: HttpTarget) -> None:
    with at_most(1_000), pytest.raises(BadCall, match=r"longer than|more than"):
        call_of(target, LONG, {}, {})


def test_a_url_is_not_quoted_beyond_its_length() -> None:
    with at_most(30_000), pytest.raises(BadCall, match="URL is longer"):
        call_of(http(url="https://example.com/" + "{args.a}" * 1_000), {"a": "ü" * 100}, {}, {})


def nested(inner: Any, levels: int) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


LARGE_BODIES = {
    "one long text": "{args.a}" * 1_000_000,
    "broken placeholders": "{args" + ".a" * 4_000_000,
    "broken secrets": "{secrets.a" * 9_000,
    "many texts": [""] * 2_600_000,
    "many texts, deep inside": nested(["x"] * 100_000 + ["{secrets.A}"], 60),
}


@pytest.mark.parametrize("body", LARGE_BODIES.values(), ids=LARGE_BODIES)
def test_the_largest_bodies_are_checked_in_bounded_steps(body: Any) -> None:
    with at_most(MOST):
        assert len(list(wrong_call(http(body=body), []))) <= 1


def test_a_body_with_too_many_placeholders_is_refused() -> None:
    assert list(wrong_call(http(body=["{args.a}"] * MOST_PLACEHOLDERS), [])) == []
    [(path, why)] = wrong_call(http(body=["{args.a}"] * (MOST_PLACEHOLDERS + 1)), [])
    assert (path, why) == ("target", "must have at most 10000 placeholders in headers and body")


class Long(str):
    """A long argument. It fails the test if a template copies more of it than a key can hold."""

    def __str__(self) -> str:
        return self

    def __getitem__(self, part: Any) -> str:
        assert part == slice(None, LONGEST_KEY, None)
        self.cuts = getattr(self, "cuts", 0) + 1
        return str.__getitem__(self, part)


def test_a_key_takes_no_more_of_each_argument_than_it_can_hold() -> None:
    argument = Long("x" * 1_000_000)
    with at_most(2_000):
        assert rendered("{args.a}" * 128, {"a": argument}) == "x" * LONGEST_KEY
    assert argument.cuts == 128


@pytest.mark.parametrize("template", ["{args" + ".a" * 509, "{args.a" * 146, "{" * 1024, "{args." + "a" * 1018])
def test_broken_keys_take_few_steps(template: str) -> None:
    with at_most(100):
        assert rendered(template, {"a": {}}) == template[:LONGEST_KEY]


# ── queries, cursors, tokens ─────────────────────────────────────────────────────────────────────────────────────────

QUERIES = ["a " * 512, '"' * 1024, '"a" ' * 256, '"' + "a " * 511, "a-" * 512, "*" * 1024, '"a b" ' * 170]


@pytest.mark.parametrize("text", QUERIES, ids=lambda text: text[:8])
def test_long_queries_are_refused_in_bounded_steps(text: str) -> None:
    with at_most(10_000), pytest.raises(ValueError, match=r"more than 20 terms|at most 50 words|has no letter"):
        Query.parse(text)


def test_a_query_of_fifty_words_is_allowed() -> None:
    query = Query.parse('"' + "a " * 50 + '"')
    assert query.fits("a " * 50) and not query.fits("a " * 49)


CURSORS = [
    "",
    "." * 1024,
    "r." + "9" * 1022,
    "s." + "1." * 511,
    "r.1.1" + ".1" * 500,
    "s.99999999999999999.x.1",
    "~" * 1024,
]


@pytest.mark.parametrize("text", CURSORS, ids=lambda text: text[:8])
def test_hostile_cursors_are_refused_in_few_steps(text: str) -> None:
    with at_most(5_000):
        with pytest.raises(BadRequest):
            parse_cursor(text, NOW)
        with pytest.raises(BadRequest):
            cursor_of({"cursor": text})
        assert Mark.parse(text) is None


def segment(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


CLAIMS = {
    "deep": b'{"a":' * 1_000 + b"1" + b"}" * 1_000,
    "deep lists": b'{"a":' + b"[" * 2_900 + b"]" * 2_900 + b"}",
    "many": b"{" + b",".join(b'"%d":1' % i for i in range(700)) + b"}",
    "escaped quotes": b'{"a":"' + b"\\u0022" * 960 + b'"}',
    "objects": b'{"\\u0022":[' + b",".join([b"{}"] * 1_900) + b"]}",
}


@pytest.mark.parametrize("claims", CLAIMS.values(), ids=CLAIMS)
def test_the_worst_tokens_are_read_in_bounded_steps(claims: bytes) -> None:
    text = ".".join(map(segment, (b'{"alg":"RS256"}', claims, b"signature")))
    assert len(text) <= MOST_TOKEN
    with at_most(10_000), contextlib.suppress(Refused):
        read(text)


@pytest.mark.parametrize("groups", [["x"] * 1_400, " ".join(["x"] * 2_800), {}], ids=["list", "text", "object"])
def test_a_hundred_rules_take_few_steps_for_the_largest_claim(groups: Any) -> None:
    rules = tuple(Rule(claim="groups", tenant="t", role="viewer", contains=f"g{i}") for i in range(100))
    with at_most(200_000):
        assert not Issuer(issuer="https://x", audience="a", rules=rules).fitting({"groups": groups})


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BODIES = {
    "objects": b'{"\\u0022":[' + b",".join([b"{}"] * 249_000) + b"]}",
    "deep objects": b'{"\\u0022":[' + b",".join([b'{"a":' * 62 + b"1" + b"}" * 62] * 4_000) + b"]}",
    "keys": b'{"\\u0022":1,' + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}",
    "scalars": b'{"a":' + b"[" * 62 + b"0," * 4_000_000 + b"[],[]" + b"]" * 62 + b"}",
    "quotes": b'{"a":"' + b"\\u0022" * 1_300_000 + b'"}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_the_slow_way_to_read_a_body_takes_bounded_steps(body: bytes) -> None:
    assert len(body) <= 8 * 2**20
    with at_most(2 * MOST):
        refuse_heavy(body)
        refuse_odd(body)


@pytest.mark.parametrize("levels", [1_000, 100_000])
@pytest.mark.parametrize("decoder", [_register, _claim, _report, _logs, _notes], ids=lambda d: d._kind.__name__)
@pytest.mark.parametrize("packed", [True, False], ids=["msgpack", "json"])
def test_a_worker_body_that_is_nested_too_deeply_is_refused(decoder: Any, packed: bool, levels: int) -> None:
    """The nested value stands in a field that no version knows, or that takes any value."""
    if packed:
        inner = b"\x91" * levels + b"\xc0"
        body = b"\x81\xa8finished\x91\x81\xa6result" + inner if decoder is _report else b"\x81\xa1x" + inner
    else:
        inner = b"[" * levels + b"]" * levels
        body = b'{"finished":[{"result":' + inner + b"}]}" if decoder is _report else b'{"x":' + inner + b"}"
    headers = {"content-type": "application/msgpack" if packed else "application/json"}
    with at_most(10_000), pytest.raises(BadRequest, match="cannot be read"):
        decoder(SimpleNamespace(request=SimpleNamespace(headers=headers), body=body))


def test_a_result_that_is_too_deep_to_be_written_does_not_stop_the_other_ends() -> None:
    deep, plain = (
        Finished(run_id="r", attempt=1, fence=1, outcome="succeeded", result=r) for r in (nested(1, 2_000), 7)
    )
    assert not weigh([deep, plain])
    assert (bytes(deep.result), bytes(plain.result)) == (
        b'{"tocsin_note":"this was nested too deeply to be stored"}',
        b"7",
    )


@pytest.mark.parametrize("levels", [MOST_LEVELS, MOST_LEVELS + 1])
def test_what_a_function_returns_is_nested_at_most_920_levels_deep(levels: int) -> None:
    text = b"[" * levels + b"]" * levels
    with at_most(10_000):
        if levels <= MOST_LEVELS:
            assert repacked(text)
        else:
            with pytest.raises(ValueError, match="must be nested at most 920 levels deep"):
                repacked(text)


# ── maps, scopes, estimates ──────────────────────────────────────────────────────────────────────────────────────────

RESULTS = {
    "too many": "[" + ",".join(["1"] * 2_000_000) + "]",
    "as many as may be": "[" + ",".join(['{"a":1}'] * MOST_MAPPED) + "]",
    "too deep": "[" * 5_000 + "]" * 5_000,
    "one large element": '["' + "x" * 8_000_000 + '"]',
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_the_largest_results_are_mapped_in_bounded_steps(result: str) -> None:
    about = Mapped("00000000-0000-0000-0000-000000000000", Map(over="n", max=MOST_MAPPED))
    with at_most(10 * MOST_MAPPED):
        found = elements_of(result, about)
    assert isinstance(found, BadMap) == (result in (RESULTS["too many"], RESULTS["too deep"]))


def test_the_longest_path_of_a_map_takes_few_steps() -> None:
    over = "n" + ("." + "k" * 128) * 16
    with at_most(200):
        made = msgspec.convert({"over": over}, Map)
        with pytest.raises(BadMap):
            made.args_for({"k" * 128: 1})
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"over": over + ".k" * 10_000}, Map)


def test_fifty_patterns_are_matched_with_a_thousand_jobs_in_bounded_steps() -> None:
    pattern = "*a" * (MOST_STARS - 2) + "*b*"  # only the last search fails
    who = Identity("k", "key", "editor", 1, "t", scope=Scope([pattern] * 49 + ["*"]))
    spec = msgspec.convert({"name": "a" * 128, "target": {"kind": "process", "command": ["x"]}}, JobSpec)
    with at_most(3 * MOST):
        for _ in range(1_000):
            within_scope(who, spec)


def test_estimates_take_one_look_at_each_tenant_and_sample() -> None:
    with at_most(100_000):
        ahead_of(10**9, 1, [(1_000, 10**9)] * 10_000)
        load_of([Sample(float(i), i * 10**12, 10**12, 10**12) for i in range(10_000)])
