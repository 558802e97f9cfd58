"""Packed arguments: told apart from all that anybody can ask for, and shown without what they hide."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.packed import Packed, packed_in, shown

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
