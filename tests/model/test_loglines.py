"""What a line carries beside its text comes back; what only looks like it stays text; nothing shown can do harm."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.loglines import MOST_ABOUT, about, harmless, joined, parted

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\x1f"))


@given(PLAIN, PLAIN, st.dictionaries(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))))
def test_what_a_line_carries_comes_back(text: str, logger: str, fields: dict[str, str]) -> None:
    told = about(logger, fields)
    found, carried = parted(joined(text, told))
    assert found == text
    if told:
        assert carried is not None and (carried.logger, carried.fields) == (logger, fields)
        assert harmless(told) == told
    else:
        assert carried is None


@given(st.text(st.characters(codec="utf-8")))
def test_whatever_was_not_made_by_us_is_text(text: str) -> None:
    found, carried = parted(text)
    assert found == text or carried is not None
    assert parted(f"a\x1f{text}b") == (f"a\x1f{text}b", None)


@given(st.text())
def test_nothing_harmful_is_left(text: str) -> None:
    shown = harmless(text)
    assert not any((ord(c) < 32 and c != "\t") or 0x7F <= ord(c) <= 0x9F for c in shown)
    assert not set(shown) & set("\u202e\u2066\u2028\u200f")
    assert harmless(shown) == shown


def test_values_of_any_kind_and_size_break_nothing() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no")

    loop: list[Any] = []
    loop.append(loop)
    for bad in (Odd(), loop, "\ud800"):
        assert about("", {"bad": bad}) == ""
    assert about("", {"long": "x" * MOST_ABOUT}) == "" == about("", {})
    assert parted(joined("t", about("db", {"at": Exception("e"), "n": 1})))[1].fields == {"at": "e", "n": 1}  # type: ignore[union-attr]
