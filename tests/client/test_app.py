"""Declared jobs: the documents they make, what is refused, how arguments are read, and what a function is told."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin import App, Context, GiveUp, Retry, wire
from tocsin.client.app import Function
from tocsin.client.context import RunLogger, Saving
from tocsin.client.failures import BadArguments, dotted, meaning, seconds_of
from tocsin.model.job import check

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTheTypeChecker


def declared(call: Callable[..., Any] | None = None, app: str = "reports", **options: Any) -> dict[str, Any]:
    """The document of a job with these options."""

    def daily(region: str = "us") -> None: ...

    document = App(app).job(**options)(call or daily).document
    check(wire.decode_job_spec(wire.encode(document)))  # the server would take it
    return document


# ── documents ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_without_options_runs_when_it_is_asked_for() -> None:
    assert declared() == {
        "name": "reports.daily",
        "target": {"kind": "python", "function": "reports.daily"},
        "schedule": {"manual": True},
        "tags": {"tocsin.app": "reports"},
    }
    assert declared(app="") == {
        "name": "daily",
        "target": {"kind": "python", "function": "daily"},
        "schedule": {"manual": True},
    }


def test_the_options_are_the_documents_fields() -> None:
    def daily() -> None:
        """Renders the report.

        And more."""

    document = declared(
        daily,
        cron="0 9 * * MON-FRI",
        timezone="America/New_York",
        until=datetime(2030, 1, 1, tzinfo=UTC),
        jitter=timedelta(seconds=90),
        retries=5,
        retry={"delay": 2.5, "give_up_on": [GiveUp, KeyError, msgspec.ValidationError, "other"]},
        timeout="10m",
        start_deadline=3600,
        overlap="queue",
        tags={"team": "sales"},
        max_concurrency=2,
    )
    assert document == {
        "name": "reports.daily",
        "target": {"kind": "python", "function": "reports.daily"},
        "schedule": {
            "cron": "0 9 * * MON-FRI",
            "timezone": "America/New_York",
            "until": "2030-01-01T00:00:00+00:00",
            "jitter": "PT90S",
        },
        "retry": {
            "delay": "PT2.5S",
            "give_up_on": ["GiveUp", "KeyError", "msgspec.ValidationError", "other"],
            "max_attempts": 6,
        },
        "tags": {"tocsin.app": "reports", "team": "sales"},
        "description": "Renders the report.",
        "timeout": "10m",
        "start_deadline": "PT3600S",
        "overlap": "queue",
        "max_concurrency": 2,
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"corn": "0 9 * * *"}, "takes no option corn"),
        ({"cron": "0 9 * * *", "every": "5m"}, "one schedule, not cron and every"),
        ({"timezone": "Europe/Berlin"}, "without a schedule"),
        ({"isolation": "fiber"}, "isolation"),
        ({"retries": 3, "retry": {"max_attempts": 2}}, "say the same"),
        ({"every": "5m", "until": datetime(2030, 1, 1)}, "no time zone"),
        ({"name": "no spaces"}, "no name of a function"),
    ],
)
def test_what_a_programmer_gets_wrong_is_told_at_once(options: dict[str, Any], why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        declared(**options)


def test_names_are_checked_and_unique() -> None:
    with pytest.raises(ValueError, match="no name of an app"):
        App("no-dashes")
    app = App("a.b")
    app.job(lambda_named("c"))
    assert list(app.jobs) == ["a.b.c"]
    with pytest.raises(ValueError, match="two functions"):
        app.function("a.b.c")(print)


def lambda_named(name: str) -> Callable[..., Any]:
    def call() -> None: ...

    call.__name__ = name
    return call


def test_a_job_is_still_its_function() -> None:
    app = App()

    @app.job
    def double(n: int) -> int:
        """Twice as much."""
        return 2 * n

    assert double(4) == 8
    assert (double.name, double.__doc__) == ("double", "Twice as much.")


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Line:
    sku: str
    count: int = 1


def render(
    ctx: Context, day: date, pages: int = 1, *, lines: list[Line] | None = None, run: UUID | None = None
) -> tuple[Any, ...]:
    return day, pages, lines, run


def fill(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    filled = Function("f", call).arguments.fill(list(args), kwargs)
    return list(filled[0]), dict(filled[1])


def test_arguments_are_read_into_what_the_parameters_are() -> None:
    _, named = fill(
        render, "2026-03-01", lines=[{"sku": "a"}, {"sku": "b", "count": 2}], run="12345678-1234-5678-1234-567812345678"
    )
    assert named == {
        "day": date(2026, 3, 1),
        "lines": [Line("a"), Line("b", 2)],
        "run": UUID("12345678-1234-5678-1234-567812345678"),
    }


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        ([], {}, "there is no argument `day`"),
        ([], {"day": "yesterday"}, "in `day`"),
        ([], {"day": "2026-03-01", "pages": "3"}, r"Expected `int`, got `str` - in `pages`"),
        ([], {"day": "2026-03-01", "colour": 1}, "it takes no argument `colour`"),
        (["2026-03-01"], {"day": "2026-03-01"}, "given twice, by position and by name: day"),
        (["2026-03-01", 1, 2], {}, "2 arguments by position, and 3 were given"),
        ([], {"day": "2026-03-01", "lines": [{"count": 1}]}, "lines"),
    ],
)
def test_wrong_arguments_are_refused_with_a_clear_word(args: list[Any], kwargs: dict[str, Any], why: str) -> None:
    with pytest.raises(BadArguments, match=why):
        fill(render, *args, **kwargs)


def test_every_kind_of_parameter_is_filled() -> None:
    def call(a: int, /, b: int, *more: Any, c: int = 3, **others: Any) -> Any:
        return a, b, more, c, others

    def called(*args: Any, **kwargs: Any) -> Any:
        positions, names = fill(call, *args, **kwargs)
        return call(*positions, **names)

    assert called(1, 2) == (1, 2, (), 3, {})
    assert called(1, b=2, d=4) == (1, 2, (), 3, {"d": 4})
    assert called(a=1, b=2, c=5) == (1, 2, (), 5, {})
    assert called(1, 2, "x", "y", c=4, z=1) == (1, 2, ("x", "y"), 4, {"z": 1})


def test_paths_are_strings_in_json_and_other_classes_are_nothing() -> None:
    def call(path: Path, host: Host | None = None) -> None: ...

    assert fill(call, "a/b")[1] == {"path": Path("a/b")}
    for kwargs in ({"path": 3}, {"path": "a", "host": "b"}):
        with pytest.raises(BadArguments, match=r"Expected `(Path|Host)"):
            fill(call, **kwargs)


def test_annotations_that_cannot_be_checked_take_anything() -> None:
    def only_for_the_type_checker(amount: OnlyForTheTypeChecker, n: int = 1, *, on: date) -> None: ...

    def no_annotation(a, b=2) -> None: ...  # type: ignore[no-untyped-def]

    def odd(what: Callable[[int], int], n: int = 1) -> None: ...

    filled = fill(only_for_the_type_checker, "1.5", n=2, on="2026-01-02")[1]
    assert filled == {"amount": "1.5", "n": 2, "on": date(2026, 1, 2)}
    with pytest.raises(BadArguments, match=r"Expected `int"):
        fill(only_for_the_type_checker, "1.5", n="x", on="2026-01-02")
    assert fill(no_annotation, 1)[1] == {"a": 1}
    with pytest.raises(BadArguments):
        fill(odd, 1, n="x")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(
    args=st.lists(_JSON, max_size=3),
    kwargs=st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), _JSON, max_size=4),
)
def test_what_python_would_bind_is_bound_and_nothing_else(args: list[Any], kwargs: dict[str, Any]) -> None:
    def call(a, b=2, *, c=3):  # type: ignore[no-untyped-def]
        return a, b, c

    try:
        expected = call(*args, **kwargs)
    except TypeError:
        with pytest.raises(BadArguments):
            fill(call, *args, **kwargs)
        return
    positions, names = fill(call, *args, **kwargs)
    assert call(*positions, **names) == expected


def test_a_submission_is_checked_like_a_call() -> None:
    function = Function("render", render)
    assert function.named((date(2026, 3, 1),), {"pages": 2}) == {"day": date(2026, 3, 1), "pages": 2}
    for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"color": 1})):
        with pytest.raises(TypeError):
            function.named(args, kwargs)

    def variadic(*things: int, **more: int) -> None: ...

    assert Function("v", variadic).named((), {"x": 1}) == {"x": 1}
    with pytest.raises(TypeError, match="cannot be sent"):
        Function("v", variadic).named((1,), {})


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class NoMoney(GiveUp):
    pass


def test_what_an_exception_means() -> None:
    assert meaning(ValueError("x")) == ("ValueError", False, None)
    assert meaning(msgspec.ValidationError("x")) == ("msgspec.ValidationError", False, None)
    assert meaning(GiveUp("x")) == ("GiveUp", True, None)
    assert meaning(NoMoney("x")) == (dotted(NoMoney), True, None)
    assert meaning(Retry("x", after="90s")) == ("Retry", False, 90.0)
    assert meaning(Retry()) == ("Retry", False, None)
    assert meaning(BadArguments("x")) == ("arguments", True, None)
    assert dotted(NoMoney).endswith("test_app.NoMoney")


@pytest.mark.parametrize(("given_", "seconds"), [("1h30m", 5400), (timedelta(minutes=2), 120), (2.5, 2.5), (0, 0)])
def test_lengths_of_time(given_: Any, seconds: float) -> None:
    assert seconds_of(given_) == seconds


# ── the context ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Host:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.about: list[str] = []

    def emit(self, level: str, text: str, about: str = "") -> None:
        self.lines.append((level, text))
        self.about.append(about)


def test_log_lines_take_values_by_name_and_by_place() -> None:
    host = Host()
    log = RunLogger("r", host)  # type: ignore[arg-type]
    log.info("rendering", region="eu", rows=3, title="two words", empty="", odd="a=b")
    log.warning("%d%% of %s", 50, "it", why="100%")
    log.debug("plain")
    log.log(logging.ERROR, "at %s", "a level", n=1)
    log.getChild("db").getChild("pool").info("named")
    assert json.loads(host.about[0])["fields"] | {"rows": 3} == json.loads(host.about[0])["fields"]
    assert host.about[2] == "" and json.loads(host.about.pop())["logger"] == "db.pool"
    assert host.lines.pop() == ("info", "named")
    try:
        raise KeyError("gone")
    except KeyError:
        log.exception("it broke", at="step 2")
    assert host.lines[:4] == [
        ("info", "rendering region=eu rows=3 title='two words' empty='' odd='a=b'"),
        ("warning", "50% of it why=100%"),
        ("debug", "plain"),
        ("error", "at a level n=1"),
    ]
    level, text = host.lines[4]
    assert level == "error" and text.startswith("it broke at='step 2'\nTraceback") and text.endswith("KeyError: 'gone'")


def test_a_context_made_by_hand_is_good_for_calling_a_function() -> None:
    ctx = Context(run_id="r", job_id="j", scheduled_for=datetime(2026, 1, 1, tzinfo=UTC))
    ctx.progress(1)
    ctx.log.info("to nowhere", at=1)
    assert isinstance(ctx.checkpoint({"a": 1}), Saving)
    assert not ctx.cancelled.is_set() and ctx.remaining > 0 and ctx.deadline > datetime.now(UTC)
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            ctx.progress(wrong)
