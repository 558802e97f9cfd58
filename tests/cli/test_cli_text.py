from __future__ import annotations

import json
import sys
import unicodedata
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.cli.text import is_plain, json_safe, length, local, milliseconds, pairs, plain, relative, when

NOW = datetime(2026, 12, 1, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("plain ünïcode 日本", "plain ünïcode 日本"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPdevice\x1b\\x", "x"),
        ("\x9b2Jcleared", "cleared"),
        ("\x1bcreset", "reset"),
        ("a\x00b\x08c\x7fd\x85e", "abcde"),
        ("two\r\nlines\tand tab", "two lines and tab"),
        ("progress 1%\rprogress 2%", "progress 1% progress 2%"),
        ("\u202eevil\u2066", "evil"),
        ("lone \ud800 surrogate", "lone  surrogate"),
        ("\x1b", ""),
        ("\x1b[", ""),
        ("pay\u061cload", "payload"),
        ("pay\u200bload\ufeff", "payload"),
        ("pay\U000e0041\U000e0042load", "payload"),
        ("soft\u00adhyphen, \u2060word joiner", "softhyphen, word joiner"),
        ("ad\u200dmin and ad\u200cmin", "admin and admin"),
        ("é\u200d\u200dé", "éé"),
        ("👩\u200d💻 ❤\ufe0f", "👩\u200d💻 ❤\ufe0f"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("two\u2028lines", "two lines"),
        ("private \ue000, never assigned \uffff", "private \ufffd, never assigned \ufffd"),
        ("hidden\u3164letter", "hiddenletter"),
    ],
)
def test_text_from_elsewhere_can_do_nothing_to_a_terminal(text: str, harmless: str) -> None:
    assert plain(text) == harmless
    assert plain(plain(text)) == harmless


EVERYTHING = [chr(code) for code in range(sys.maxunicode + 1)]


def test_only_visible_characters_of_unicode_remain() -> None:
    odd = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    signs = set("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
    for character in EVERYTHING:
        shown = plain(f"a{character}b")
        kind = unicodedata.category(character)
        if character in "\t\n\r\u2028\u2029":
            assert shown == "a b", hex(ord(character))
        elif character in "\x1b\x90\x98\x9b\x9d\x9e\x9f":
            assert not set(shown) - set("ab"), "begins an escape sequence, which may take what follows along"
        elif kind in ("Co", "Cn"):
            assert shown == "a\ufffdb", hex(ord(character))
        elif kind in odd and character not in signs:
            assert shown == "ab", hex(ord(character))
        else:
            assert shown in (f"a{character}b", "ab"), hex(ord(character))
            assert {unicodedata.category(c) for c in shown} & odd <= {"Cf"}


def test_all_of_unicode_comes_through_json_and_nothing_hidden_is_printed() -> None:
    for start in range(0, len(EVERYTHING), 4096):
        document = {"text": " ".join(EVERYTHING[start : start + 4096])}
        printed = json_safe(json.dumps(document, ensure_ascii=False))
        assert json.loads(printed) == document
        assert all(is_plain(c) for c in printed)


@given(st.text(st.sampled_from("aé👩\u200d\u200c\u200b\x1b[m]\x07\\ \n\u2028\U000e0041")))
def test_cleaned_text_needs_no_further_cleaning(text: str) -> None:
    assert plain(plain(text)) == plain(text)


def test_json_stays_the_same_document() -> None:
    document = {"text": "ü \x1b[31m \x9b2J \u202e \ud800 \u2028"}
    printed = json_safe(json.dumps(document, ensure_ascii=False))
    assert json.loads(printed) == document
    assert "ü" in printed
    assert plain(printed) == printed


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 ms"),
        (0.35, "350 ms"),
        (1, "1 s"),
        (4.26, "4.2 s"),
        (59.9, "59 s"),
        (60, "1 m"),
        (190, "3 m 10 s"),
        (630, "10 m"),
        (3600, "1 h"),
        (7500, "2 h 5 m"),
        (90_000, "1 d 1 h"),
        (12 * 86_400 + 3600, "12 d"),
    ],
)
def test_lengths(seconds: float, words: str) -> None:
    assert length(timedelta(seconds=seconds)) == words


@pytest.mark.parametrize(
    ("at", "words"),
    [
        ("2026-12-01T09:03:00.000000Z", "in 3 m"),
        ("2026-12-01T07:00:00.000000Z", "2 h ago"),
        ("2026-12-01T09:00:00.500000Z", "now"),
        ("someday", "someday"),
        ("", ""),
        (None, ""),
    ],
)
def test_instants_are_told_from_now(at: str | None, words: str) -> None:
    assert relative(at, NOW) == words


def test_instants_are_local_with_their_offset() -> None:
    at = "2026-12-01T09:00:00.000000Z"
    shown = local(at)
    assert datetime.fromisoformat(shown) == NOW
    assert shown == NOW.astimezone().isoformat(sep=" ")
    assert when(at, NOW) == f"{shown} (now)"
    assert local("not a \x1b[31mtime") == "not a time"
    assert when(None, NOW) == ""


def test_small_things() -> None:
    assert milliseconds(None) == ""
    assert milliseconds(1500) == "1.5 s"
    assert pairs({"a": 1, "b": None, "c": "x"}) == "a=1, c=x"
    assert pairs(None) == ""
