"""The worker's side of the HTTP protocol: typed calls in, typed answers or one of four errors out."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from tocsin import wire
from tocsin.client.credentials import trust
from tocsin.errors import TocsinError

_MSGPACK = "application/msgpack"
_REGISTER_TIMEOUT = 10.0
_CLAIM_SLACK = 10.0
_CONNECTIONS, _FETCHES = 8, 4  # what runs need and is large must not keep reports from getting through
_Answer = TypeVar("_Answer")


class Unreachable(TocsinError):
    """No answer, or one that says to try again later."""


class Refused(TocsinError):
    """The server will not have us, now or later; the text says why."""


class WrongProtocol(Refused):
    """The server speaks another protocol than we do; the text says whom to upgrade."""


class UnknownWorker(TocsinError):
    """We were declared lost: our runs are no longer ours."""


class LogConflict(TocsinError):
    """A log shipment does not fit what the server has."""

    def __init__(self, code: str, expected_offset: int | None) -> None:
        super().__init__(code)
        self.code, self.expected_offset = code, expected_offset


class _Problem(msgspec.Struct):
    code: str = ""
    detail: str = ""
    expected_offset: int | None = None


class Link:
    """One server, one key. Holds no state of the worker."""

    def __init__(self, url: str, key: str, ca: str = "") -> None:
        self.url = url.rstrip("/")
        self._trust = trust(self.url, ca)
        self._headers = {
            "Authorization": f"Bearer {key}",
            "Content-Type": _MSGPACK,
            "Accept": _MSGPACK,
            wire.PROTOCOL_HEADER: str(wire.PROTOCOL),
        }
        self._session: aiohttp.ClientSession | None = None
        self._fetches = asyncio.Semaphore(_FETCHES)

    async def __aenter__(self) -> Link:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS, keepalive_timeout=60, ssl=self._trust),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def register(self, body: wire.Register) -> wire.Registered:
        """Become a worker; every other refusal than "later" is final here, because nothing has begun yet."""
        return await self._ask("register", body, wire.Registered, _REGISTER_TIMEOUT, refusals=range(400, 429))

    async def claim(self, worker_id: str, body: wire.Claim) -> wire.ClaimAnswer:
        """Long-poll for runs."""
        return await self._ask(f"{worker_id}/claim", body, wire.ClaimAnswer, body.wait + _CLAIM_SLACK)

    async def report(self, worker_id: str, body: bytes, timeout: float) -> wire.ReportAnswer:
        """Send an encoded `wire.Report`; encoded, because a repeat must be exact."""
        return await self._ask(f"{worker_id}/report", body, wire.ReportAnswer, timeout)

    async def ship_logs(self, worker_id: str, chunks: list[wire.LogChunk], timeout: float) -> None:
        """Send log lines."""
        await self._post(f"{worker_id}/logs", wire.LogShipment(chunks=chunks), timeout)

    async def note(self, worker_id: str, notes: list[wire.RunNote], timeout: float) -> list[wire.RunKey]:
        """Send what runs say of themselves; those of them that are still ours, and so were kept."""
        body, refusals = wire.Notes(notes=notes), range(400, 429)
        return (await self._ask(f"{worker_id}/notes", body, wire.NotesAnswer, timeout, refusals)).kept

    async def fetch(self, path: str, sha256: str, timeout: float) -> Any:
        """Arguments that did not come with their run."""
        content = await self._get(path, timeout)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Unreachable("they are not what was stored")
        return _told(content)

    async def fetch_parents(self, path: str, token: str, timeout: float) -> dict[str, wire.Parent]:
        """What a run's parents ended with, where it did not come with the run."""
        content = await self._get(path, timeout, {"Authorization": f"Bearer {token}", "Accept": "application/json"})
        found: dict[str, wire.Parent] = _told(content, dict[str, wire.Parent])
        return found

    async def _get(self, path: str, timeout: float, headers: Mapping[str, str] | None = None) -> bytes:
        assert self._session is not None
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with (
                self._fetches,
                self._session.get(self.url + path, headers=headers, timeout=limit) as response,
            ):
                content = await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as exc:  # noqa: UP041 (differs before 3.11)
            raise Unreachable(f"{type(exc).__name__}: {exc}") from exc
        if response.status >= 300:
            raise Unreachable(f"HTTP {response.status}")
        return content

    async def _ask(
        self, path: str, body: Any, kind: type[_Answer], timeout: float, refusals: range = range(0)
    ) -> _Answer:
        content_type, content = await self._post(path, body, timeout, refusals)
        try:
            if content_type == _MSGPACK:
                return msgspec.msgpack.decode(content, type=kind)
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as exc:
            raise Unreachable(f"the answer cannot be read: {exc}") from exc

    async def _post(self, path: str, body: Any, timeout: float, refusals: range = range(0)) -> tuple[str, bytes]:
        assert self._session is not None
        data = body if isinstance(body, bytes) else wire.encode_msgpack(body)
        try:
            async with self._session.post(
                f"{self.url}/v1/worker/{path}", data=data, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as exc:  # noqa: UP041 (differs before 3.11)
            raise Unreachable(f"{type(exc).__name__}: {exc}") from exc
        if response.status >= 300:
            raise _error(response.status, content, refusals)
        return response.content_type, content


def _told(content: bytes, kind: Any = Any) -> Any:
    """What a run is told in JSON, as far as a runner can be told it as well."""
    try:
        found = msgspec.json.decode(content, type=kind)
        wire.encode_msgpack(found)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as exc:
        raise Unreachable(f"the answer cannot be read: {exc}") from exc
    return found


def _error(status: int, content: bytes, refusals: range) -> TocsinError:
    try:
        problem = msgspec.json.decode(content, type=_Problem)
    except msgspec.MsgspecError:
        problem = _Problem(detail=content[:200].decode("utf-8", "replace"))
    text = f"HTTP {status} {problem.code}: {problem.detail}"
    if status in (404, 410) and problem.code == "unknown_worker":
        return UnknownWorker(text)
    if status == 426:
        return WrongProtocol(text)
    if status in (401, 403) or status in refusals:
        return Refused(text)
    if status == 409 and problem.code in ("log_gap", "superseded"):
        return LogConflict(problem.code, problem.expected_offset)
    return Unreachable(text)
