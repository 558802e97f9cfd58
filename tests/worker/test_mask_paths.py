"""Secrets at every position of every text that leaves a worker: no secret is visible, wherever the text is cut."""

from __future__ import annotations

import base64
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.client.app import Function
from tocsin.client.context import Context, RunLogger
from tocsin.client.failures import BadArguments
from tocsin.model import masks
from tocsin.model.loglines import parted
from tocsin.model.masks import BLOT, Mask
from tocsin.wire import ClaimedRun, Finished, LogLine, RunError
from tocsin.worker.ends import outgoing
from tocsin.worker.executors import Attempt
from tocsin.worker.executors.http import KEPT_BYTES, _Answer, _Wall
from tocsin.worker.frames import Call, CallTarget, Done
from tocsin.worker.lines import LINE_BYTES, LineSplitter
from tocsin.worker.masks import AttemptMask
from tocsin.worker.runner.notes import Notes, RunHost
from tocsin.worker.runner.output import OutputBuffer, RunStream
from tocsin.worker.runner.run import CURRENT, Run, failed, succeeded

PLAIN = "xK9vQ2mWz7RtB4nLp8sYd3FhJ6cGa5Ue0iTo1EwAqZb"
ODD = "pä\"ss'w\\rd/<&>+ öf€\U0001f511 m%n $y"
TOKEN = "tcr_7.1099511627999.0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a6978"
SECRETS = [PLAIN, ODD, TOKEN]


def upper_json(text: str) -> str:
    return "".join(c if c.isascii() and c not in '"\\' else units(c) for c in text)


def units(character: str) -> str:
    """Return a character as JSON in UTF-16 units with upper-case digits."""
    if character in '"\\':
        return f"\\{character}"
    data = character.encode("utf-16-be")
    return "".join(f"\\u{data[i]:02X}{data[i + 1]:02X}" for i in range(0, len(data), 2))


WRITTEN: dict[str, Callable[[str], str]] = {
    "raw": str,
    "repr": lambda s: repr(s)[1:-1],
    "repr, both quotes": lambda s: repr(s + "'\"")[1:-4],
    'repr, only "': lambda s: repr(s + "'\"")[1:-4].replace("\\'", "'"),
    "ascii": lambda s: ascii(s)[1:-1],
    "bytes": lambda s: repr(s.encode())[2:-1],
    "json": lambda s: json.dumps(s)[1:-1],
    "json, utf-8": lambda s: json.dumps(s, ensure_ascii=False)[1:-1],
    "json, upper": upper_json,
    "json, slashes": lambda s: json.dumps(s)[1:-1].replace("/", "\\/"),
    "json, slashes and upper": lambda s: upper_json(s).replace("/", "\\/"),
    "json of Go": lambda s: (
        json.dumps(s, ensure_ascii=False)[1:-1].replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    ),
    "url": lambda s: quote(s, safe=""),
    "url, path": quote,
    "url, component": lambda s: quote(s, safe="!'()*"),
    "base64": lambda s: base64.b64encode(s.encode()).decode(),
    "base64 behind one byte": lambda s: base64.b64encode(b"_" + s.encode()).decode(),
    "base64 behind two bytes": lambda s: base64.b64encode(b"__" + s.encode()).decode(),
}


def seen(text: str, written: str) -> int:
    """Return how many consecutive characters of the written value are visible."""
    most = 0
    for i in range(len(written)):
        while written[i : i + most + 1] in text and i + most < len(written):
            most += 1
    return most


def assert_hidden(text: str, written: str) -> None:
    # Three characters of a cut value may be visible, and base64 shares its border characters with the neighbouring
    # bytes.
    assert seen(text, written) < 8, text[:300]


def a_run(secret: str) -> Run:
    given: Any = (0, 0, "run", 1, 1, "job", None, "2026-01-01T00:00:00Z", None, TOKEN, 1000, 0, 1)
    return Run(Call(*given, secrets={"S": secret}), CallTarget("f", [], {}), Function("f", lambda: None))


def an_attempt(secret: str) -> Attempt:
    run = ClaimedRun(
        run_id="run",
        attempt=1,
        fence=1,
        start_at="2026-01-01T00:00:00Z",
        timeout_ms=1000,
        job_id="job",
        job_name=None,
        scheduled_for="2026-01-01T00:00:00Z",
        args=None,
        token=TOKEN,
        secrets={"S": secret},
    )
    return Attempt(run, None, None, 0)  # type: ignore[arg-type]


def around(cut: int, written: str) -> Iterator[str]:
    """Yield texts with the value at every position at which a cut goes through it or is next to it."""
    for before in range(max(cut - len(written) - 2, 0), cut + 3):
        yield "." * before + written + "." * 50


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def told(done: Done, secret: str) -> Finished:
    """Return the end as it leaves the worker."""
    attempt = an_attempt(secret)
    end = attempt.finished(done.outcome, error_class=done.error_class, message=done.message, result=done.result)
    return outgoing(attempt, end)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("how", ["raw", "repr", "json", "base64"])
@pytest.mark.parametrize("cut", [2048, 4096])
def test_the_text_of_an_exception(secret: str, how: str, cut: int) -> None:
    written = WRITTEN[how](secret)
    run = a_run(secret)
    for text in around(cut, written):
        for exc in (ValueError(text), BadArguments(text)):
            try:
                raise exc
            except (ValueError, BadArguments) as raised:
                end = told(failed(run, 1, raised), secret)
            assert end.error is not None
            assert_hidden(end.error.message, written)


@pytest.mark.parametrize("secret", SECRETS)
def test_the_class_of_an_exception(secret: str) -> None:
    for name in around(256, secret):
        kind = type("E", (Exception,), {"__qualname__": name, "__module__": "m"})
        end = told(failed(a_run(secret), 1, kind()), secret)
        assert end.error is not None
        assert_hidden(end.error.class_, secret)


@pytest.mark.parametrize("secret", SECRETS)
def test_a_key_error_and_a_result_that_cannot_be_stored(secret: str) -> None:
    end = told(failed(a_run(secret), 1, KeyError(secret)), secret)
    assert end.error is not None
    assert_hidden(end.error.message, repr(secret)[1:-1])

    class Refuses:
        @property
        def __dataclass_fields__(self) -> Any:
            raise ValueError("." * 4000 + secret)

    end = told(succeeded(a_run(secret), 1, Refuses()), secret)
    assert end.error is not None and end.error.class_ == "result"
    assert_hidden(end.error.message, secret)


# ── http ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("how", ["raw", "url"])
def test_the_shown_part_of_an_answer_is_masked(secret: str, how: str) -> None:
    written = WRITTEN[how](secret)
    attempt = an_attempt(secret)
    for location in around(200, written):
        assert_hidden(_Answer(302, {"Location": location}, b"", 0).why(attempt).message, written)
    for media_type in around(256, written):
        assert_hidden(str(_Answer(200, {"Content-Type": media_type}, b"", 0).result(attempt)), written)
    for text in around(500, written):
        assert_hidden(_Wall(None, "h").why(OSError(text), attempt).message, written)  # type: ignore[arg-type]
    for body in list(around(KEPT_BYTES, written))[:: max(1, len(written) // 8)]:
        data = body.encode()
        assert_hidden(str(_Answer(200, {}, data[: KEPT_BYTES + 1], len(data)).result(attempt)), written)


# ── output ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def logged(buffer: OutputBuffer, secret: str) -> list[str]:
    lines: list[LogLine] = [(o.at, o.stream, o.level, o.text) for o in buffer.take()]
    return [line[3] for line in AttemptMask([secret, TOKEN]).output(lines)]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("how", WRITTEN)
def test_lines_that_are_cut(secret: str, how: str) -> None:
    written = WRITTEN[how](secret)
    for text in list(around(LINE_BYTES, written))[:: max(1, len(written) // 10)]:
        splitter = LineSplitter()
        lines = [*splitter.feed(text.encode()), *splitter.end()]
        shown = AttemptMask([secret]).output([(0.0, "stdout", "info", line) for line in lines])
        assert_hidden("".join(line[3] for line in shown), written)
        buffer = OutputBuffer(lambda: None)
        RunHost(a_run(secret), buffer, Notes(lambda: None)).emit("info", text, '{"logger":"db"}')
        assert_hidden("".join(parted(line)[0] for line in logged(buffer, secret)), written)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("how", WRITTEN)
def test_chunks_that_are_cut_anywhere(secret: str, how: str) -> None:
    written = WRITTEN[how](secret)
    text = f"before {written} after"
    for cut in range(len(text)):
        mask = AttemptMask([secret])
        first = mask.output([(0.0, "stdout", "info", text[:cut])])
        then = mask.output([(0.0, "stdout", "info", text[cut:])])
        shown = first[0][3] + then[0][3]
        assert_hidden(shown, written)
        assert shown.startswith("before ") and shown.endswith(" after"[-3:])


@pytest.mark.parametrize("secret", SECRETS)
def test_fields_of_a_record(secret: str) -> None:
    buffer = OutputBuffer(lambda: None)
    host = RunHost(a_run(secret), buffer, Notes(lambda: None))
    log = RunLogger("run", host)
    log.info("login", password=secret, token=TOKEN)
    log.info("login %s", secret, of={"nested": [secret]})
    log.info("a document", json=json.dumps({"password": secret}))
    log.info(secret, user="x")
    context = Context(run_id="run", job_id="job", scheduled_for=None, host=host)  # type: ignore[arg-type]
    context.log.warning("wrong: %r", secret)
    for line in logged(buffer, secret):
        for how in WRITTEN.values():
            assert_hidden(line, how(secret))
        assert_hidden(line, TOKEN)


def test_fields_do_not_come_between_the_lines_of_a_secret() -> None:
    secret = "abc12\ndef34"
    buffer = OutputBuffer(lambda: None)
    RunLogger("run", RunHost(a_run(secret), buffer, Notes(lambda: None))).info(secret, user="x")
    text = "".join(logged(buffer, secret))
    assert "abc12" not in text and "def34" not in text


def test_a_line_with_a_dropped_piece_ends_there() -> None:
    """The agent does not keep up while a long line is written: the following text may be the rest of a secret."""
    buffer, run = OutputBuffer(lambda: None), a_run(PLAIN)
    stream = RunStream("stdout", sys.stdout, buffer)
    token = CURRENT.set(run)
    try:
        buffer.choked = True
        stream.write("." * LINE_BYTES + PLAIN[:20])
        buffer.choked = False
        stream.write(f"{PLAIN[20:]} and on")
        stream.write(" and on\nthe next line\n")
    finally:
        CURRENT.reset(token)
    assert [text for text in logged(buffer, PLAIN) if text] == ["the next line"]


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def shown_result(result: Any, secret: str) -> Any:
    raw = msgspec.Raw(msgspec.msgpack.encode(result))
    end = told(Done(0, "run", 1, 1, 1, result=raw), secret)
    assert end.result is not None
    return msgspec.msgpack.decode(end.result)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.sampled_from(SECRETS), st.sampled_from(sorted(WRITTEN)), st.text(max_size=3), st.data())
def test_a_secret_anywhere_in_a_result(value: Any, secret: str, how: str, beside: str, data: st.DataObject) -> None:
    written = WRITTEN[how](secret)
    planted = f"{beside}{written}{beside}"
    result = {
        "key": data.draw(st.sampled_from([planted, [planted], {planted: value}, [value, {"deep": [[planted]]}]])),
        "value": value,
    }
    shown = shown_result(result, secret)
    assert_hidden(json.dumps(shown, ensure_ascii=False), written)
    assert_hidden(json.dumps(shown), written)


@given(JSON)
def test_a_result_without_a_secret_is_not_changed(value: Any) -> None:
    assert shown_result({"v": value}, PLAIN) == {"v": value}


@pytest.mark.parametrize(
    ("secret", "value"),
    [
        ("73921846", 73921846),
        ("73921846", 73921846.0),
        ("73921846", -73921846),
        ("0073921846", 73921846),
        ("7392.1846", 7392.1846),
        ("7392.50", 7392.5),
        ("18446744073709551615", 2**64 - 1),
        ("73921846", 1739218461),
    ],
)
def test_a_number_that_is_a_secret(secret: str, value: float) -> None:
    shown = shown_result({"pin": value, "list": [value], "n": 3, "yes": True}, secret)
    assert BLOT in str(shown["pin"]) and BLOT in str(shown["list"]) and (shown["n"], shown["yes"]) == (3, True)
    assert_hidden(str(shown).replace("0.0", ""), secret.lstrip("0"))


@pytest.mark.parametrize("secret", ["0000", "1.00", "1e10", "0.001"])
def test_a_secret_of_few_digits_blots_out_no_small_numbers(secret: str) -> None:
    assert shown_result([0, 1, 1.0, 7], secret) == [0, 1, 1.0, 7]


def test_the_token_is_masked_where_there_are_no_secrets() -> None:
    run = msgspec.structs.replace(an_attempt("").run, secrets={})
    attempt = Attempt(run, None, None, 0)  # type: ignore[arg-type]
    raw = msgspec.Raw(msgspec.msgpack.encode({"env": f"TOCSIN_RUN_TOKEN={TOKEN}"}))
    end = outgoing(attempt, attempt.finished("succeeded", result=raw))
    assert end.result is not None and msgspec.msgpack.decode(end.result) == {"env": f"TOCSIN_RUN_TOKEN={BLOT}"}
    end = outgoing(attempt, attempt.finished("failed", error_class="E", message=f"Bearer {TOKEN}"))
    assert end.error == RunError(class_="E", message=f"Bearer {BLOT}")
    [line] = attempt.mask.output([(0.0, "stdout", "info", f"TOCSIN_RUN_TOKEN={TOKEN}")])
    assert line[3] == f"TOCSIN_RUN_TOKEN={BLOT}"


def test_an_end_without_text_creates_no_mask() -> None:
    attempt = an_attempt("")
    attempt.run.secrets.clear()
    outgoing(attempt, attempt.finished("succeeded", result=msgspec.Raw(msgspec.msgpack.encode([1, 2, 3]))))
    assert attempt._mask is None


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_value_may_be_nested_as_deeply_as_it_likes() -> None:
    value: Any = PLAIN
    for _ in range(50_000):
        value = [value]
    value = [value]
    shown = Mask([PLAIN]).value({"deep": value})["deep"]
    while isinstance(shown, list):
        [shown] = shown
    assert shown == BLOT
    while isinstance(value, list):  # take it apart by hand: Python itself recurses when it frees it
        [value] = value


def steps(call: Callable[[], object]) -> int:
    """Return how many lines of the module are executed."""
    count = 0

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != masks.__file__:
            return None
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


REPETITIVE = {
    "nothing": lambda n: ["a line of a log without anything"] * n,
    "one character": lambda n: ["a" * 100] * n,
    "almost": lambda n: ["aaaaaaaaaaab" * 8] * n,
    "all of it": lambda n: ["aaaaaaaaaaaaaaaaaaac"] * n,
    "long lines": lambda n: ["aaaa" * 20 * n],
}


@pytest.mark.parametrize("how", REPETITIVE)
@pytest.mark.parametrize("what", ["lines", "value"])
def test_the_work_grows_with_the_text_and_no_faster(how: str, what: str) -> None:
    mask = Mask(["a" * 19 + "c", "a" * 300 + "b", "aaaa"])

    def work(n: int) -> int:
        texts = REPETITIVE[how](n)
        if what == "lines":
            return steps(
                lambda: AttemptMask(["a" * 19 + "c", "aaaa"]).output([(0.0, "s", "i", text) for text in texts])
            )
        return steps(lambda: mask.value({"rows": texts, "more": [{text: text} for text in texts]}))

    assert work(400) <= 4.5 * work(100) + 500
