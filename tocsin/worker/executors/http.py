"""Target `http`: a request, sent from this worker to an address that a job may have.

The wall against requests into our own networks stands where a socket is made (`_Wall`): what is dialled is the very
address that was judged, at every hop, whatever a name resolves to a moment later. So each request has a connection of
its own: one that another tenant's list has opened is no one else's.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from tocsin import __version__
from tocsin.errors import ApiProblem
from tocsin.model.addresses import Allowed
from tocsin.model.httpcall import (
    BadCall,
    Call,
    call_of,
    error_class,
    host_of,
    is_expected,
    redirected,
    retry_after,
    signed,
)
from tocsin.model.loglines import from_outside
from tocsin.model.strict import refuse_odd
from tocsin.telemetry import get_logger
from tocsin.wire import ClaimedRun, Finished, LogLine
from tocsin.worker.executors import KILL_PATIENCE, LOST, Attempt, Executor, Why
from tocsin.worker.lines import LineSplitter, OutputLimit
from tocsin.worker.targets import NO_RESOURCES, HttpTarget

log = get_logger("worker")

_Decoder = codecs.getincrementaldecoder("utf-8")
KEPT_BYTES = 32 * 1024  # of an answer, in the run's result
READ_BYTES = 64 * 1024 * 1024  # of an answer; then the connection is closed
_CONNECT_SECONDS = 30.0
_RESOLVERS = 32  # threads: a name server that is slow holds up names, never requests
_REDIRECTS = (301, 302, 303, 307, 308)


class HttpExecutor(Executor):
    """Sends requests, as many at once as there are slots, each a task on the loop.

    `inside`: private networks and this machine are open to all jobs, for development."""

    kind = "http"

    def __init__(
        self,
        url: str,
        *,
        inside: bool = False,
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__()
        self._url, self._inside = url, inside
        self._resolver = resolver or Resolver()
        self._tls = tls or ssl.create_default_context()
        self._running: dict[Attempt, asyncio.Task[Finished]] = {}
        self._lost: dict[Attempt, Why] = {}

    def start(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            attempt.started_ns = time.monotonic_ns()
            task = self._running[attempt] = asyncio.ensure_future(self._supervise(attempt))
            task.add_done_callback(functools.partial(self._over, attempt))

    def stop(self, attempt: Attempt) -> None:
        """Hang up; there is nobody to ask, so nothing to wait for."""
        task = self._running.get(attempt)
        if task is not None and not attempt.stopping:
            attempt.stopping = "cancelled"
            task.cancel()

    async def kill_all(self, why: Why = LOST) -> None:
        for attempt, task in self._running.items():
            self._lost.setdefault(attempt, why)
            task.cancel()
        if self._running:
            await asyncio.wait(set(self._running.values()), timeout=KILL_PATIENCE)

    async def close(self) -> None:
        await super().close()
        await self._resolver.close()

    async def _supervise(self, attempt: Attempt) -> Finished:
        try:
            async with asyncio.timeout(attempt.run.timeout_ms / 1000):
                return await self._exchange(attempt)
        except TimeoutError:
            text = f"no answer after {attempt.run.timeout_ms} ms"
            return attempt.finished("timeout", error_class="timeout", message=text)
        except Exception as exc:  # a bug of ours is this run's end, not the worker's
            log.error("a request failed in an unknown way", run=attempt.run.run_id, how=attempt.discreet(exc))
            return _failed(attempt, Why("internal", from_outside(f"{type(exc).__name__}: {exc}")))

    def _over(self, attempt: Attempt, task: asyncio.Task[Finished]) -> None:
        """Tell how it ended. Not within the task: one that is cancelled before its first step never takes any."""
        del self._running[attempt]
        why = self._lost.pop(attempt, None)
        if not task.cancelled():
            end = task.result()
        else:
            end = attempt.finished("cancelled") if why is None else _failed(attempt, why, "lost")
        if attempt.resources is not NO_RESOURCES:  # they are those of whoever is called
            end.usage = {"enforced": attempt.resources.enforced()}
        self.sink.ended([(attempt, end)])

    async def _exchange(self, attempt: Attempt) -> Finished:
        """Send the request, follow where it is led, and read the answer."""
        target: HttpTarget = attempt.target
        try:
            call = self._call(attempt.run, target)
        except BadCall as exc:
            return _failed(attempt, Why("arguments", str(exc)))
        allowed = Allowed(attempt.run.http_allow, inside=self._inside)
        for hop in range(target.redirects + 1):
            try:
                answer = await self._send(attempt, call, allowed, may_redirect=hop < target.redirects)
            except _Failure as failure:
                return _failed(attempt, failure.why)
            if answer.next is None:
                return await self._judge(attempt, target, answer)
            call = answer.next
        raise AssertionError("the last hop is not allowed another")

    def _call(self, run: ClaimedRun, target: HttpTarget) -> Call:
        call = call_of(target, run.args, run.secrets, self._about(run, target))
        if target.sign_with is None:
            return call
        secret = run.secrets.get(target.sign_with)
        if not secret:
            raise BadCall(f"the secret {target.sign_with}, to sign with, was not delivered")
        return call._replace(headers=call.headers | signed(secret, run.run_id, int(time.time()), call.body))

    def _about(self, run: ClaimedRun, target: HttpTarget) -> dict[str, str]:
        about = {
            "Accept": "*/*",
            "Accept-Encoding": "identity",  # nothing is unpacked here, so nothing can explode
            "User-Agent": f"Tocsin/{__version__}",
            "Idempotency-Key": run.run_id,
            "Tocsin-Run-Id": run.run_id,
            "Tocsin-Job-Id": run.job_id,
            "Tocsin-Job-Name": run.job_name or "",
            "Tocsin-Attempt": str(run.attempt),
            "Tocsin-Fence": str(run.fence),
            "Tocsin-Scheduled-For": run.scheduled_for,
            "Tocsin-Logical-At": run.stands_for,
        }
        if target.callback:
            about["Tocsin-Callback"] = f"{self._url}/v1/runs/{run.run_id}/complete"
            about["Tocsin-Run-Token"] = run.token
        return about

    async def _send(self, attempt: Attempt, call: Call, allowed: Allowed, may_redirect: bool) -> _Answer:
        wall = _Wall(allowed, host_of(call.url))
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, force_close=True, ssl=self._tls, socket_factory=wall.socket
        )
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS)
        session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, timeout=timeout
        )
        try:
            async with (
                session,
                session.request(
                    call.method,
                    URL(call.url, encoded=True),
                    headers=call.headers,
                    data=call.body,
                    allow_redirects=False,
                    skip_auto_headers=("Content-Type",),
                ) as response,
            ):
                headers = _headers(response)
                location = headers.get("Location", "")
                # A location that is not plain text is not followed: the dialled address must be the one that is shown.
                plain = location == response.headers.get("Location", "")
                if may_redirect and plain and response.status in _REDIRECTS:
                    following = redirected(call, response.status, location)
                    if following is not None:
                        return _Answer(response.status, {}, b"", 0, following)
                return await self._read(attempt, response, headers)
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            raise _Failure(wall.why(exc, attempt)) from exc
        finally:
            wall.hang_up()

    async def _read(self, attempt: Attempt, response: aiohttp.ClientResponse, headers: Mapping[str, str]) -> _Answer:
        """The answer, of which the beginning is kept and the lines go to the log."""
        kept, size = bytearray(), 0
        splitter, limit = LineSplitter(), OutputLimit()
        async for data in response.content.iter_any():
            size += len(data)
            kept += data[: max(KEPT_BYTES + 1 - len(kept), 0)]
            if limit.reached:
                self.sink.output(attempt, [], data.count(b"\n"))
            else:
                self._output(attempt, limit, splitter.feed(data))
            if size > READ_BYTES:
                break
        self._output(attempt, limit, splitter.end())
        return _Answer(response.status, headers, bytes(kept), size)

    def _output(self, attempt: Attempt, limit: OutputLimit, lines: list[str]) -> None:
        kept, dropped = limit.take(lines)
        if kept or dropped:
            at = time.time()
            shaped: list[LogLine] = [(at, "stdout", "info", line) for line in kept]
            self.sink.output(attempt, shaped, dropped)

    async def _judge(self, attempt: Attempt, target: HttpTarget, answer: _Answer) -> Finished:
        if target.callback and answer.status == 202:
            # The end comes from elsewhere, as an order to stop; the time-out and the lease go on.
            await asyncio.get_running_loop().create_future()
        result = msgspec.Raw(msgspec.msgpack.encode(answer.result(attempt)))
        if is_expected(answer.status, target.expect_status):
            return attempt.finished("succeeded", result=result)
        end = _failed(attempt, answer.why(attempt))
        end.result = result
        end.not_before = retry_after(answer.status, answer.headers, datetime.now(UTC))
        return end


class _Answer(NamedTuple):
    """What came back, or (`next`) where it leads."""

    status: int
    headers: Mapping[str, str]
    kept: bytes
    size: int
    next: Call | None = None

    def result(self, attempt: Attempt) -> dict[str, Any]:
        """Return the result of the run. Texts that are cut are masked here, before the cut; everything is masked again
        later."""
        whole = len(self.kept) <= KEPT_BYTES
        media_type = attempt.masked(self.headers.get("Content-Type", ""), 256)
        body = self._body(whole)
        if not whole:
            body = attempt.mask.text(body)  # a secret that the cut went through begins at the end of the body
        out = {"status": self.status, "content_type": media_type, "bytes": self.size, "body": body}
        return out if whole else out | {"truncated": True}

    def _body(self, whole: bool) -> Any:
        if whole and "json" in self.headers.get("Content-Type", "").lower():
            try:
                refuse_odd(self.kept)
                value = msgspec.json.decode(self.kept)
                msgspec.msgpack.encode(value)
                return value
            except (ApiProblem, msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
                pass  # then it is text
        # Leave out an incomplete character at the cut: a secret may begin there.
        return _Decoder("replace").decode(self.kept[:KEPT_BYTES], whole).replace("\0", "�")

    def why(self, attempt: Attempt) -> Why:
        """The error that a status which nobody expects is."""
        text = f"HTTP {self.status}"
        if self.status in _REDIRECTS:
            text += f" to {attempt.masked(self.headers.get('Location', 'nowhere'), 200)}, which is not followed"
        return Why(error_class(self.status), text)


class _Failure(Exception):
    """There was no answer."""

    def __init__(self, why: Why) -> None:
        super().__init__(why.message)
        self.why = why


class _Wall:
    """Makes the sockets of one request, to addresses that it may have, and knows what it refused."""

    def __init__(self, allowed: Allowed, host: str) -> None:
        self._allowed, self._host = allowed, host
        self._refused = ""
        self._sockets: list[socket.socket] = []

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for this address, which is what it will be connected to; raises if it is refused."""
        family, kind, protocol, _, address = info
        refusal = self._allowed.refusal(self._host, str(address[0]))
        if refusal is not None:
            self._refused = refusal
            raise OSError(refusal)
        made = socket.socket(family=family, type=kind, proto=protocol)
        self._sockets.append(made)
        return made

    def hang_up(self) -> None:
        """Nothing is sent or received any more, at once: closing alone would first send what is still to be sent."""
        for made in self._sockets:
            with contextlib.suppress(OSError):  # it is closed, or was never connected
                made.shutdown(socket.SHUT_RDWR)

    def why(self, error: Exception, attempt: Attempt) -> Why:
        """What a request that failed is told."""
        text = attempt.masked(from_outside(str(error)), 500) or type(error).__name__
        if self._refused:
            return Why("refused_address", self._refused)
        if isinstance(error, aiohttp.InvalidURL):  # 2130706433, 0x7f.1: an address in a form that hides it
            return Why("refused_address", f"{self._host} is not an address in its usual form")
        if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
            return Why("tls", text)
        if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ClientResponseError | ValueError):
            return Why("protocol", f"the answer breaks off or is no HTTP: {text}")
        return Why("connect", text)


class Resolver(AbstractResolver):
    """Names by the system's rules, in threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, "tocsin-names")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._look_up, host, port)
        return [
            ResolveResult(hostname=host, host=str(address[0]), port=port, family=kind, proto=proto, flags=0)
            for kind, _, proto, _, address in found
        ]

    def _look_up(self, host: str, port: int) -> list[Any]:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _headers(response: aiohttp.ClientResponse) -> Mapping[str, str]:
    """Return the headers of an answer as text that can be stored. Bytes that are not UTF-8 arrive as surrogates."""
    headers = response.headers.copy()
    for name, value in response.headers.items():
        if (text := from_outside(value)) != value:
            headers[name] = text
    return headers


def _failed(attempt: Attempt, why: Why, outcome: Any = "failed") -> Finished:
    return attempt.finished(outcome, error_class=why.error_class, message=why.message)
