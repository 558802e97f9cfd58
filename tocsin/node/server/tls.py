"""TLS: the certificate that callers are shown, read anew when its files change.

A handshake takes the certificate that is good at that moment; connections that stand are not touched. A pair of files
that cannot be used (half written, of different keys, gone) leaves the last good one in place, and is told once.
"""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tocsin.errors import SetupError
from tocsin.node.loop import Loop
from tocsin.telemetry import TLS_EXPIRES_AT, TLS_RELOAD_FAILURES, get_logger

log = get_logger("tls")
_LOOK_SECONDS = 2.0
_SOON = timedelta(days=14)
# Of TLS 1.2 what keeps past traffic closed when the key is lost, and what proves what it encrypts; 1.3 has no other.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class Certificate(Loop):
    """The certificate of this server."""

    name = "certificate"

    def __init__(self, cert: str, key: str = "") -> None:
        """From these PEM files; `key` may stand in the same one. Raises if they cannot be used."""
        super().__init__()
        self._files = Path(cert), Path(key or cert)
        self._seen = self._look()
        try:
            self._current, self.expires_at = self._load()
        except (OSError, ValueError) as error:
            raise SetupError(f"the certificate {cert} cannot be used: {_words(error)}") from None
        self._tell()
        self.context = _context(*self._files)
        # Called in each handshake, with or without a name: the one place where a context can be exchanged.
        self.context.sni_callback = self._show

    def _show(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._current

    async def run_once(self) -> float:
        """Take up files that have changed."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._current, self.expires_at = self._load()
            except (OSError, ValueError) as error:
                TLS_RELOAD_FAILURES.inc()
                log.error("the new certificate cannot be used; the old one is shown on", error=_words(error))
            else:
                log.info("the certificate was read anew", expires_at=self.expires_at.isoformat())
                self._tell()
        return _LOOK_SECONDS

    def _look(self) -> tuple[object, ...]:
        """What tells one state of the files from another."""
        return tuple(_state(file) for file in self._files)

    def _load(self) -> tuple[ssl.SSLContext, datetime]:
        return _context(*self._files), expiry(self._files[0].read_bytes())

    def _tell(self) -> None:
        TLS_EXPIRES_AT.set(self.expires_at.timestamp())
        if self.expires_at - datetime.now(UTC) < _SOON:
            log.warning("the certificate ends soon", expires_at=self.expires_at.isoformat(), file=str(self._files[0]))


def expiry(pem: bytes) -> datetime:
    """When the first certificate of a chain ends."""
    from cryptography.x509 import load_pem_x509_certificate

    return load_pem_x509_certificate(pem).not_valid_after_utc


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(cert, key, password=_no_password)
    return context


def _no_password() -> str:
    """Without this, OpenSSL would ask the terminal."""
    raise ValueError("the private key is locked with a password; give one without")


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _words(error: Exception) -> str:
    """The reason; OpenSSL says it in capitals."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
