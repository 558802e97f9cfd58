"""The vault: master keys, what is derived from them, and how bytes are sealed (AES-256-GCM).

Master keys never meet data. Each wraps small data keys, which seal the data, so that a new master key means to wrap
some keys anew and not to encrypt everything again. The first of the keys wraps, all of them unwrap.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tocsin.errors import ServerFault, SetupError, Unavailable
from tocsin.store.home import private_folder, write_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_NONCE_BYTES = 12
_SALT_BYTES = 16
SEAL_BYTES = _SALT_BYTES + _NONCE_BYTES + 16  # that sealing adds; the last is the tag
_KEY = re.compile(r"[A-Za-z0-9+/]{43}=")
_HEADER = (
    "# Master keys of Tocsin's secrets, one a line: the first seals, all unseal. Without them no secret is readable.\n"
)


class Wrapped(NamedTuple):
    """A data key as it is stored: readable with the master key of that id only."""

    key_id: str
    data: bytes


class MasterKeys:
    """The master keys of this server, of which there may be none."""

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self._keys = {_fingerprint(key): key for key in keys}

    @classmethod
    def load(cls, given: str, home: Path) -> MasterKeys:
        """From the setting (the keys themselves, or the path of a file with them), else from the home."""
        if not given and not key_file(home).exists():
            return cls()
        if given and (not given.startswith(("/", ".", "~")) or _KEY.match(given)):  # a key may begin with a slash, too
            return cls(_parse(given, "TOCSIN_MASTER_KEY"))
        path = Path(given).expanduser() if given else key_file(home)
        try:
            return cls(_parse(path.read_text(), str(path)))
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"the master keys in {path} cannot be read: {error}") from None

    @property
    def ids(self) -> list[str]:
        """Their names, made from the keys themselves; the first is the one that seals."""
        return list(self._keys)

    def derive(self, purpose: str) -> bytes:
        """A key of its own for a purpose, from the first master key."""
        return _hkdf(self._first()[1], b"", purpose.encode())

    def derive_all(self, purpose: str) -> list[bytes]:
        """The same from every master key: what one of them signed is good for as long as that key is kept."""
        return [_hkdf(key, b"", purpose.encode()) for key in self._keys.values()]

    def wrap(self, data_key: bytes, context: bytes) -> Wrapped:
        """Seal a data key; only the same `context` opens it again."""
        key_id, key = self._first()
        return Wrapped(key_id, seal(_hkdf(key, b"", b"wrap"), data_key, context))

    def unwrap(self, wrapped: Wrapped, context: bytes) -> bytes:
        """The data key; refuses what was wrapped for another context or changed since."""
        if wrapped.key_id not in self._keys:
            raise Unavailable(
                f"this server lacks the master key {wrapped.key_id}, with which this was sealed", code="no_master_key"
            )
        return unseal(_hkdf(self._keys[wrapped.key_id], b"", b"wrap"), wrapped.data, context)

    def _first(self) -> tuple[str, bytes]:
        for key_id, key in self._keys.items():
            return key_id, key
        raise Unavailable(
            "this server has no master key, so it keeps no secrets; set TOCSIN_MASTER_KEY", code="no_master_key"
        )


def new_key() -> bytes:
    """256 random bits."""
    return os.urandom(KEY_BYTES)


def seal(key: bytes, plain: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate; `context` is not kept, yet must be the same to unseal.

    Each message has a key of its own, derived with a random salt, so that no number of messages under one data key
    comes near the point where random nonces begin to meet.
    """
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    return salt + nonce + _cipher(key, salt).encrypt(nonce, plain, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """What was sealed; refuses whatever was changed, or sealed with another key or for another context."""
    from cryptography.exceptions import InvalidTag

    salt, nonce, text = sealed[:_SALT_BYTES], sealed[_SALT_BYTES:][:_NONCE_BYTES], sealed[_SALT_BYTES + _NONCE_BYTES :]
    try:
        return _cipher(key, salt).decrypt(nonce, text, context)
    except (InvalidTag, ValueError):
        raise ServerFault("what was sealed has been changed, or belongs elsewhere", code="seal_broken") from None


def context_of(*parts: str | int) -> bytes:
    """Names what sealed bytes belong to, such that no two lists of parts read the same."""
    encoded = [str(part).encode() for part in parts]
    return b"".join(b"%d:%s" % (len(part), part) for part in encoded)


def key_file(home: Path) -> Path:
    """Where `tocsin up` keeps its master key."""
    return home / "secrets" / "master-keys"


def ensure_key_file(home: Path) -> None:
    """Make a master key for a home that has none."""
    private_folder(home / "secrets")
    path = key_file(home)
    if not path.exists():
        write_private(path, f"{_HEADER}{base64.b64encode(new_key()).decode()}\n")


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 25 ms: only who seals something pays for it

    return AESGCM(_hkdf(key, salt, b"message"))


def _parse(text: str, source: str) -> list[bytes]:
    words = re.sub(r"#.*", "", text).replace(",", " ").split()
    for number, word in enumerate(words, 1):
        if not _KEY.fullmatch(word):  # the word itself is not told: it may be nearly a key
            raise SetupError(f"key {number} in {source} is not 32 bytes in base64 (openssl rand -base64 32)")
    if not words:
        raise SetupError(f"{source} has no key in it; one is made by: openssl rand -base64 32")
    return [base64.b64decode(word) for word in words]


def _fingerprint(key: bytes) -> str:
    return _hkdf(key, b"", b"id").hex()[:12]


def _hkdf(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) of 32 bytes."""
    return hmac.digest(hmac.digest(salt or bytes(32), key, "sha256"), purpose + b"\x01", "sha256")
