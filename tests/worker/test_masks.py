"""Masks: a value is found however it is written and wherever it is cut, and nothing else is touched."""

from __future__ import annotations

import base64
import itertools
import json
import random
import re
import string
import textwrap
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.loglines import about, clean, joined, parted
from tocsin.model.masks import BLOT
from tocsin.wire import Finished, LogLine, RunError
from tocsin.worker.lines import LineSplitter
from tocsin.worker.masks import AttemptMask as Mask

SECRET = 'cänary+7/?x "q\\z'
PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\r\nEFAASCBKcwggSjAgEAAoIBAQ\n-----END KEY-----\n"
WRITTEN: dict[str, Callable[[str], str]] = {
    "raw": str,
    "url": lambda s: quote(s, safe=""),
    "url, slashes": quote,
    "form": quote_plus,
    "url, lower": lambda s: re.sub("%..", lambda m: m[0].lower(), quote(s, safe="")),
    "json": lambda s: json.dumps(s)[1:-1],
    "json, utf-8": lambda s: json.dumps(s, ensure_ascii=False)[1:-1],
    **{f"base64 behind {n}": lambda s, n=n: base64.b64encode(b"x" * n + s.encode() + b"yz").decode() for n in range(4)},
    "url-safe base64": lambda s: base64.urlsafe_b64encode(s.encode()).decode(),
}


def shown(mask: Mask, *batches: list[str], stream: str = "stdout") -> list[str]:
    out: list[str] = []
    for batch in batches:
        lines: list[LogLine] = [(0.0, stream, "info", text) for text in batch]
        out += [line[3] for line in mask.output(lines)]
    return out


def leaks(texts: list[str], value: str, most: int = 4) -> bool:
    """Whether `most` characters of the value in a row are to be seen, however the lines are cut."""
    seen = "".join(texts)
    plain = value.replace("\n", "").replace("\r", "")
    return any(plain[i : i + most] in seen for i in range(len(plain) - most + 1))


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("value", [SECRET, "hunter22", "abcd", "pässwörd"])
def test_every_way_of_writing_is_found(how: str, value: str) -> None:
    written = WRITTEN[how](value)
    [line] = shown(Mask([value]), [f"before {written} after"])
    assert BLOT in line and line.startswith("before ") and line.endswith(" after")
    if "base64" not in how:
        assert line == f"before {BLOT} after"
    assert len(line) <= len(f"before {BLOT} after") + 12, "what base64 shares with its neighbours is all that is left"


@given(st.data())
def test_wherever_it_is_cut(data: st.DataObject) -> None:
    """Into lines and into batches of lines, at any places."""
    value = data.draw(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40))
    text = f"one two {value} three {value}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    batches: list[list[str]] = [[]]
    for piece in pieces:
        if data.draw(st.booleans()):
            batches.append([])
        batches[-1].append(piece)
    seen = shown(Mask([value]), *batches)
    assert len(seen) == len(pieces)
    # A value whose beginning alone was there may show less than would have been told from its first characters.
    rest = "".join(seen).replace(BLOT, "\0")
    for i in range(len(value) - 7):
        assert value[i : i + 8] not in rest


@given(st.integers(257, 3000), st.lists(st.integers(0, 4000), max_size=8), st.integers(0, 2**32))
def test_a_long_value_is_followed_through_all_pieces(length: int, cuts: list[int], seed: int) -> None:
    value = "".join(random.Random(seed).choices(string.ascii_letters, k=length))
    text = f"before {value} after {value[:-1]}"
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    mask = Mask([value])
    seen = [shown(mask, [text[a:b]])[0] for a, b in itertools.pairwise(places)]
    assert not leaks(seen, value, 8)
    assert "".join(seen).startswith("before ") and " after " in "".join(seen)


def test_what_is_made_to_look_like_a_value_costs_no_more_than_to_read_it() -> None:
    lines = ["a" * 16_384] * 64
    assert shown(Mask(["a" * 65_536]), *[[line] for line in lines]) == [BLOT] * 64
    [line] = shown(Mask(["a" * 65_535 + "b"]), ["a" * 400_000 + "c"])
    assert line.endswith("c") and len(line) < 20
    assert shown(Mask(["a" * 256 + "b" * 1000]), *[[line] for line in lines])[-1] == BLOT


def test_of_a_long_value_that_is_cut_off_all_that_is_there_is_blotted_out() -> None:
    value = "".join(random.Random(7).choices(string.ascii_letters, k=5000))
    assert shown(Mask([value]), [f"{value[:3000]}… and so on"]) == [f"{BLOT}… and so on"]


@given(st.lists(st.text(st.sampled_from("abc \n"), max_size=20), max_size=8))
def test_without_a_value_nothing_changes(lines: list[str]) -> None:
    assert shown(Mask(["xyzw" * 4]), lines) == lines


def test_streams_are_looked_through_each_by_itself() -> None:
    mask = Mask(["opensesame"])
    first: list[LogLine] = [
        (1.0, "stdout", "info", "it is open"),
        (2.0, "stderr", "error", "another"),
        (3.0, "stdout", "info", "sesame!"),
    ]
    assert mask.output(first) == [
        (1.0, "stdout", "info", f"it is {BLOT}"),
        (2.0, "stderr", "error", "another"),
        (3.0, "stdout", "info", f"{BLOT}!"),
    ]


def test_a_key_of_several_lines_in_any_form() -> None:
    splitter = LineSplitter()
    lines = splitter.feed(f"the key:\n{PEM}and on\n".encode()) + splitter.end()
    assert shown(Mask([PEM]), lines) == ["the key:", BLOT, BLOT, BLOT, BLOT, "and on"]
    assert shown(Mask([PEM]), *[[line] for line in lines]) == ["the key:", BLOT, BLOT, BLOT, BLOT, "and on"]
    assert not leaks(shown(Mask([PEM]), [repr(json.dumps({"key": PEM}))]), "QIBADANBgkqhk")
    wrapped = textwrap.wrap(base64.encodebytes(PEM.encode() * 2).decode().replace("\n", ""), 76)
    assert not leaks(shown(Mask([PEM]), *[[line] for line in wrapped]), base64.b64encode(PEM.encode()).decode(), 12)
    assert shown(Mask([PEM]), ["only EFAASCBKcwggSjAgEAAoIBAQ here"]) == [f"only {BLOT} here"]


def test_a_line_too_long_is_masked_across_its_pieces() -> None:
    value = "a-secret-of-some-length"
    for shift in range(len(value) + 1):
        splitter = LineSplitter()
        data = b"x" * (16 * 1024 - shift) + value.encode() + b"y" * 100 + b"\n"
        assert not leaks(shown(Mask([value]), splitter.feed(data)), value)


def test_ends_are_masked_too() -> None:
    mask = Mask([SECRET])
    packed = msgspec.Raw(msgspec.msgpack.encode({"rows": 3, SECRET: [f"<{SECRET}>", None, 1.5]}))
    end = Finished(
        run_id="r",
        attempt=1,
        fence=1,
        outcome="failed",
        error=RunError(class_="E", message=f"no\n{SECRET}"),
        result=packed,
    )
    mask.end(end)
    assert end.error == RunError(class_="E", message=f"no\n{BLOT}")
    assert msgspec.msgpack.decode(end.result) == {"rows": 3, BLOT: [f"<{BLOT}>", None, 1.5]}


def test_overlapping_values_leave_nothing_of_either() -> None:
    assert shown(Mask(["abcdef", "defghi"]), ["<abcdefghi>"]) == [f"<{BLOT}>"]
    assert shown(Mask(["aaaa"]), ["<aaaaaa>"]) == [f"<{BLOT}>"]


@pytest.mark.parametrize("secret", ['quo"ted\\secret', "zwölf Boxkämpfer", "first line\nsecond line"])
def test_what_a_line_carries_beside_its_text_is_masked_and_stays_readable(secret: str) -> None:
    beside = clean(about("db", {"password": secret, "n": 1}))
    [(_, _, _, text)] = Mask([secret]).output([(0.0, "log", "info", joined("connected", beside))])
    told, carried = parted(text)
    assert told == "connected" and carried is not None and carried.fields == {"password": BLOT, "n": 1}
