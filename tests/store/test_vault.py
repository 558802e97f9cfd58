"""The vault: what was sealed comes back only to who has the key, unchanged and where it belongs."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from tocsin.errors import ServerFault, SetupError, Unavailable
from tocsin.store import vault
from tocsin.store.vault import MasterKeys, Wrapped, context_of, ensure_key_file, key_file, new_key, seal, unseal

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))


def text_of(*keys: bytes) -> str:
    return ",".join(base64.b64encode(key).decode() for key in keys)


@given(st.binary(max_size=200), st.binary(max_size=50), st.binary(min_size=32, max_size=32))
def test_what_was_sealed_comes_back(plain: bytes, context: bytes, key: bytes) -> None:
    sealed = seal(key, plain, context)
    assert unseal(key, sealed, context) == plain
    assert seal(key, plain, context) != sealed


@given(st.data())
def test_any_changed_bit_is_noticed(data: st.DataObject) -> None:
    sealed = bytearray(seal(KEY, b"plain", b"context"))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ServerFault) as refused:
        unseal(KEY, bytes(sealed), b"context")
    assert refused.value.code == "seal_broken"


@pytest.mark.parametrize("cut", range(0, 61))
def test_what_was_cut_is_noticed(cut: int) -> None:
    with pytest.raises(ServerFault):
        unseal(KEY, seal(KEY, b"plain" * 4, b"")[:cut], b"")


def test_another_key_or_context_opens_nothing() -> None:
    sealed = seal(KEY, b"plain", b"context")
    for key, context in ((OTHER, b"context"), (KEY, b""), (KEY, b"context ")):
        with pytest.raises(ServerFault):
            unseal(key, sealed, context)


@given(st.lists(st.text(max_size=4), max_size=4), st.lists(st.text(max_size=4), max_size=4))
def test_contexts_are_the_same_only_for_the_same_parts(one: list[str], two: list[str]) -> None:
    assert (context_of(*one) == context_of(*two)) == (one == two)


def test_hkdf_is_the_standards() -> None:
    for salt in (b"", b"salt" * 4):
        reference = HKDF(SHA256(), 32, salt or None, b"purpose").derive(KEY)
        assert vault._hkdf(KEY, salt, b"purpose") == reference


def test_the_first_key_wraps_and_all_unwrap() -> None:
    old, both = MasterKeys([KEY]), MasterKeys([OTHER, KEY])
    data_key = new_key()
    before, after = old.wrap(data_key, b"c"), both.wrap(data_key, b"c")
    assert before.key_id == old.ids[0] and after.key_id == both.ids[0] != before.key_id
    assert both.ids == MasterKeys([OTHER]).ids + old.ids
    assert both.unwrap(before, b"c") == both.unwrap(after, b"c") == data_key
    with pytest.raises(Unavailable, match=after.key_id) as refused:
        old.unwrap(after, b"c")
    assert refused.value.code == "no_master_key"
    with pytest.raises(ServerFault):
        both.unwrap(Wrapped(after.key_id, before.data), b"c")


def test_derived_keys_differ_by_purpose_and_outlive_a_rotation() -> None:
    old, both = MasterKeys([KEY]), MasterKeys([OTHER, KEY])
    assert old.derive("tokens") == MasterKeys([KEY]).derive("tokens") != old.derive("other") != KEY
    assert both.derive_all("tokens") == [both.derive("tokens"), old.derive("tokens")]
    assert MasterKeys().derive_all("tokens") == []


def test_without_a_master_key_the_problem_is_named() -> None:
    for use in (lambda: MasterKeys().derive("x"), lambda: MasterKeys().wrap(KEY, b"")):
        with pytest.raises(Unavailable, match="TOCSIN_MASTER_KEY") as refused:
            use()
        assert refused.value.code == "no_master_key"


def test_keys_come_from_the_setting_a_file_or_the_home(tmp_path: Path) -> None:
    assert MasterKeys.load("", tmp_path).ids == []
    wanted = MasterKeys([KEY, OTHER]).ids
    assert MasterKeys.load(text_of(KEY, OTHER), tmp_path).ids == wanted
    assert MasterKeys.load(text_of(KEY, OTHER).replace(",", "\n"), tmp_path).ids == wanted
    file = tmp_path / "keys"
    file.write_text(f"# from the safe\n{text_of(KEY)}  # new\n\n{text_of(OTHER)}\n")
    assert MasterKeys.load(str(file), tmp_path).ids == wanted
    slash = base64.b64decode("/" * 42 + "8=")
    assert MasterKeys.load(text_of(slash), tmp_path).ids == MasterKeys([slash]).ids


def test_a_home_gets_a_key_once_that_only_its_owner_reads(tmp_path: Path) -> None:
    ensure_key_file(tmp_path)
    assert stat.S_IMODE(key_file(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file(tmp_path).parent.stat().st_mode) == 0o700
    first = MasterKeys.load("", tmp_path).ids
    ensure_key_file(tmp_path)
    assert len(first) == 1 and MasterKeys.load("", tmp_path).ids == first


@pytest.mark.parametrize("bad", ["hunter2hunter2", ",", text_of(KEY) + ",x", text_of(KEY[:-1]), "./nowhere", "/"])
def test_bad_keys_are_refused_without_being_told(bad: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError) as refused:
        MasterKeys.load(bad, tmp_path)
    assert "hunter2" not in str(refused.value)
