"""Words, phrases and beginnings are found where a plain reading finds them; a filter never hides what is there."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model import logsearch
from tocsin.model.logsearch import Filter, Query, folded, words

TEXT = st.text(st.sampled_from('abAB01_é-. "*:\t'), max_size=30)


def plain(text: str) -> list[str]:
    """The words of a line, the slow way."""
    return [word.lower() if word.isascii() else word for word in re.findall(r"[A-Za-z0-9_é]+", text)]


def lowered(word: str) -> str:
    return "".join(c.lower() if c.isascii() else c for c in word)


@given(TEXT, st.text("abAB01_é", min_size=1, max_size=3))
def test_a_word_and_a_beginning_are_found_where_they_are(line: str, word: str) -> None:
    has = [lowered(found) for found in plain(line)]
    assert Query.parse(word).fits(line) == (lowered(word) in has)
    assert Query.parse(word + "*").fits(line) == any(found.startswith(lowered(word)) for found in has)


@given(TEXT, st.lists(st.text("ab01", min_size=1, max_size=2), min_size=1, max_size=3))
def test_a_phrase_is_found_where_its_words_follow_each_other(line: str, phrase: list[str]) -> None:
    has = [lowered(found) for found in plain(line)]
    follow = any(has[i : i + len(phrase)] == phrase for i in range(len(has)))
    for written in (f'"{" ".join(phrase)}"', "-".join(phrase)):
        assert Query.parse(written).fits(line) == follow
    assert Query.parse(" ".join(phrase)).fits(line) == (set(phrase) <= set(has))


@given(st.lists(TEXT, max_size=5), TEXT)
def test_neither_a_filter_nor_a_glance_hides_a_line_that_fits(lines: list[str], text: str) -> None:
    try:
        query = Query.parse(text)
    except ValueError:
        return
    whole = "\n".join(lines).encode()
    if any(query.fits(line) for line in lines):
        assert query.may_be_in(folded(whole)) and Filter.of(words(whole)).may_have(query.words)


@given(TEXT, st.integers(1, 9))
def test_a_long_text_has_the_same_words_in_pieces(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logsearch, "_PIECE", piece)
        assert words(text.encode()) == {lowered(word).encode() for word in plain(text)}


def test_a_filter_is_small_and_seldom_wrong() -> None:
    made = Filter.of([b"word%d" % i for i in range(10_000)])
    assert len(made.bits) <= 15_000
    wrong = sum(made.may_have([b"other%d" % i]) for i in range(10_000))
    assert wrong < 500
    assert Filter.of([]).may_have([]) and not Filter.of([]).may_have([b"a"])


@pytest.mark.parametrize("bad", ["", "   ", "--", '"', '""', "*", " ".join("a" * 21)])
def test_a_query_that_asks_for_nothing_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        Query.parse(bad)
