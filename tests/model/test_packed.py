"""Packed arguments: told apart from all that anybody can ask for, and shown without what they hide."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.packed import (
    LARGE,
    Packed,
    Parcel,
    filled,
    has_references,
    packed_in,
    parcels_of_result,
    result_shown,
    shown,
    size_of,
)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), _JSON, max_size=4))
def test_whatever_anybody_asks_for_is_not_packed(args: dict[str, Any]) -> None:
    text = msgspec.json.encode(args).decode()
    assert packed_in(text) is None
    assert msgspec.json.decode(shown(text) or b"") == args
    assert packed_in(None) is None and shown(None) is None


@given(
    st.builds(
        Packed,
        size=st.integers(0, 2**40),
        data_key=st.integers(0, 5),
        sealed=st.text(max_size=20),
        place=st.text(max_size=20),
        sha256=st.text(max_size=20),
        key_id=st.none() | st.text(max_size=20),
    )
)
def test_what_is_packed_comes_back_and_is_not_shown(packed: Packed) -> None:
    assert packed_in(packed.text) == packed
    told = msgspec.json.decode(shown(packed.text) or b"")
    assert told == (
        {"$sensitive": True} if packed.data_key else {"$payload": {"size": packed.size, "sha256": packed.sha256}}
    )


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────

PARCEL = Parcel(size=100_000, sha256="ab" * 32, day="2026-03-10")
_LIKE_IT = st.sampled_from([PARCEL.reference, PARCEL.reference[1:], ' {"$payload":', " ", '"', "\\"])
_RESULT = st.recursive(
    st.none() | st.integers(-(2**53), 2**53) | _LIKE_IT | st.text(max_size=5) | st.just(PARCEL.shown),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_LIKE_IT | st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(_RESULT)
def test_nobodys_result_is_taken_for_a_reference(result: Any) -> None:
    text = msgspec.json.encode(result).decode()
    assert not has_references(text) and parcels_of_result(text) == [] and filled(text, {}) == text
    assert size_of(text) == len(text.encode())
    assert msgspec.json.decode(result_shown(text) or b"") == result


@given(_RESULT, _RESULT, _RESULT)
def test_a_reference_is_found_alone_and_within_a_list(before: Any, large: Any, after: Any) -> None:
    one, content, other = (msgspec.json.encode(each) for each in (before, large, after))
    alone, among = PARCEL.reference, f"[{one.decode()},{PARCEL.reference},{other.decode()}]"
    assert msgspec.json.decode(alone) == PARCEL.shown, "to whoever does not know of it, it is JSON"
    for text, whole in ((alone, large), (among, [before, large, after])):
        assert has_references(text) and parcels_of_result(text) == [PARCEL]
        assert msgspec.json.decode(filled(text, {PARCEL.sha256: content})) == whole
        assert size_of(text) == len(text.encode()) - len(alone) + PARCEL.size
    assert msgspec.json.decode(result_shown(alone, error="payload_gone") or b"") == {
        "$payload": {"size": 100_000, "sha256": "ab" * 32, "error": "payload_gone"}
    }


def test_a_large_result_in_its_row_is_shown_by_its_size() -> None:
    text = '"' + "x" * LARGE + '"'
    assert msgspec.json.decode(result_shown(text) or b"")["$payload"]["size"] == LARGE + 2
