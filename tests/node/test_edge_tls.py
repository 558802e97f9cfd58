"""TLS over real sockets: who is spoken to, and a certificate that is exchanged under way."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from cryptography.hazmat.primitives.serialization import load_pem_private_key as load_key

from tests import PATIENCE
from tests.certificates import Authority
from tocsin.errors import SetupError
from tocsin.node.server.protocol import HttpServer, Reply, Request
from tocsin.node.server.tls import Certificate
from tocsin.telemetry import TLS_EXPIRES_AT, TLS_RELOAD_FAILURES

GET = b"GET /x HTTP/1.1\r\nhost: localhost\r\n\r\n"


class House:
    """A server with a certificate, and callers who trust its authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.cert, self.key = self.authority.issue("first")
        self.certificate = Certificate(str(self.cert), str(self.key))
        self.http = HttpServer(self._respond)
        self.port = 0

    @staticmethod
    async def _respond(request: Request) -> Reply:
        return Reply(request.path.encode())

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority.ca))

    async def call(self, trust: ssl.SSLContext | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=trust or self.trust(), server_hostname="localhost"
        )

    async def shown(self) -> str:
        """The name on the certificate that a new caller is shown."""
        _, writer = await self.call()
        found = writer.get_extra_info("peercert")
        writer.close()
        return str(dict(part[0] for part in found["subject"])["commonName"])

    def replace(self, name: str) -> None:
        cert, key = self.authority.issue(name)
        os.replace(key, self.key)
        os.replace(cert, self.cert)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    house.port = await house.http.start("127.0.0.1", 0, house.certificate.context)
    yield house
    await house.http.stop(grace=1.0)


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(GET)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    assert await reader.readexactly(2) == b"/x"
    return head


async def test_a_new_certificate_is_shown_to_new_callers_and_cuts_no_old_one(house: House) -> None:
    old = await house.call()
    assert (await ask(*old)).startswith(b"HTTP/1.1 200")
    assert await house.shown() == "first"
    house.replace("second")
    await house.certificate.run_once()
    assert await house.shown() == "second"
    assert (await ask(*old)).startswith(b"HTTP/1.1 200")
    assert TLS_EXPIRES_AT._value.get() > datetime.now(UTC).timestamp()
    old[1].close()


@pytest.mark.parametrize("what", ["garbage", "another's key", "no file", "half a file"])
async def test_what_cannot_be_used_leaves_the_last_good_one(house: House, what: str) -> None:
    before = TLS_RELOAD_FAILURES._value.get()
    whole = house.cert.read_bytes()
    match what:
        case "garbage":
            house.cert.write_text("this is no certificate")
        case "another's key":
            house.cert.write_bytes(house.authority.issue("second")[0].read_bytes())
        case "no file":
            house.cert.unlink()
        case _:
            house.cert.write_bytes(whole[: len(whole) // 2])
    for _ in range(3):
        await house.certificate.run_once()
    assert await house.shown() == "first"
    assert TLS_RELOAD_FAILURES._value.get() == before + 1, "said once, not at every look"
    house.replace("third")
    await house.certificate.run_once()
    assert await house.shown() == "third"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
async def test_old_versions_and_plain_words_are_not_answered(house: House) -> None:
    old = house.trust()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await house.call(old)
    weak = house.trust()
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-GCM-SHA256:AES128-SHA")  # no forward secrecy
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await house.call(weak)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(GET)
    assert b"HTTP" not in await asyncio.wait_for(reader.read(), PATIENCE)
    writer.close()
    reader, writer = await house.call()
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.close()


async def test_a_handshake_that_does_not_come_is_cut(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tocsin.node.server.listen._HANDSHAKE_SECONDS", 0.1)
    server = HttpServer(house._respond)
    port = await server.start("127.0.0.1", 0, house.certificate.context)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()
    await server.stop(grace=1.0)


def test_a_server_does_not_start_without_a_usable_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("one")
    for files in ((cert, tmp_path / "none"), (cert, authority.issue("two")[1]), (authority.ca, key)):
        with pytest.raises(SetupError, match="cannot be used"):
            Certificate(str(files[0]), str(files[1]))
    locked = load_key(key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
    )
    key.write_bytes(locked)
    with pytest.raises(SetupError, match="locked with a password"):
        Certificate(str(cert), str(key))


def test_key_and_certificate_in_one_file(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("one", life=timedelta(days=30))
    both = tmp_path / "both.pem"
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    left = Certificate(str(both)).expires_at - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
