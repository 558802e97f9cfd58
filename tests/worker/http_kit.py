"""What tests of the `http` target call with and call: an executor alone, names that they make up, and an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from tests import PATIENCE
from tocsin.wire import ClaimedRun, Finished, LogLine
from tocsin.worker.executors import Attempt
from tocsin.worker.executors.http import HttpExecutor
from tocsin.worker.targets import HttpTarget, Resources, Spec

_numbers = itertools.count(1)


class Ends:
    """The sink: what the executor says, and a wait for it."""

    def __init__(self) -> None:
        self.ends: dict[str, list[Finished]] = {}
        self.lines: dict[str, list[str]] = {}
        self._changed = asyncio.Event()

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        for attempt, end in ends:
            self.ends.setdefault(attempt.run.run_id, []).append(end)
        self._changed.set()

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        raise AssertionError("http runs are never handed back")

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        self.lines.setdefault(attempt.run.run_id, []).extend(line[3] for line in lines)

    def note(self, attempt: Attempt, note: Any, answer: Any) -> None:
        raise AssertionError("requests say nothing of themselves")

    async def of(self, attempt: Attempt) -> Finished:
        async with asyncio.timeout(PATIENCE):
            while attempt.run.run_id not in self.ends:
                self._changed.clear()
                await self._changed.wait()
        [end] = self.ends[attempt.run.run_id]
        return end


class Names(AbstractResolver):
    """Names that a test makes up: each answers with the next of its lists of addresses, the last one for ever."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = {name.replace("_", "."): answers for name, answers in names.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        self.asked.append(host)
        answers = self.names[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


class Caller:
    """An executor and what it is given."""

    def __init__(self, executor: HttpExecutor) -> None:
        self.executor, self.ends = executor, Ends()
        executor.sink = self.ends

    def start(self, url: str, allow: Iterable[str] = ("127.0.0.1",), **more: Any) -> Attempt:
        n = next(_numbers)
        given = {name: more.pop(name) for name in ("args", "secrets") if name in more}
        run = ClaimedRun(
            run_id=f"run-{n}",
            attempt=2,
            fence=77,
            start_at="",
            timeout_ms=int(1000 * more.pop("timeout", PATIENCE)),
            job_id="job-1",
            job_name="call",
            scheduled_for="2026-12-01T09:00:00.000000Z",
            token="the-token",
            http_allow=list(allow),
            **given,
        )
        resources = more.pop("resources", Resources())
        target = msgspec.convert({"kind": "http", "url": url, **more}, HttpTarget)
        attempt = Attempt(run, Spec(target=target, resources=resources), self.executor, 0)
        self.executor.start([attempt])
        return attempt

    async def call(self, url: str, allow: Iterable[str] = ("127.0.0.1",), **more: Any) -> Finished:
        return await self.ends.of(self.start(url, allow, **more))


@contextlib.asynccontextmanager
async def calling(**given: Any) -> AsyncIterator[Caller]:
    caller = Caller(HttpExecutor("http://tocsin.example", **given))
    yield caller
    await caller.executor.close()


class Site:
    """An endpoint at 127.0.0.1 that does what the path says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answer: Callable[[web.Request], Any] = lambda _: web.Response(text="ok")
        self.waiting = 0
        self.arrived = asyncio.Condition()
        self.go = asyncio.Event()
        self.url = ""

    async def serve(self, request: web.Request) -> Any:
        body = await request.read()
        self.requests.append((request.method, request.path_qs, dict(request.headers), body))
        match request.path.split("/")[1:]:
            case ["status", code]:
                return web.Response(status=int(code), text="said")
            case ["wait"]:
                async with self.arrived:
                    self.waiting += 1
                    self.arrived.notify_all()
                await self.go.wait()
                return web.Response(text="late")
            case ["to"]:
                return web.Response(
                    status=int(request.query.get("as", "302")), headers={"Location": request.query["url"]}
                )
        return self.answer(request)

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE), self.arrived:
            await self.arrived.wait_for(lambda: self.waiting >= count)


@contextlib.asynccontextmanager
async def served(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    site = Site()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, 0, ssl_context=tls).start()
    port = runner.addresses[0][1]
    site.url = f"{'https' if tls else 'http'}://{host}:{port}"
    try:
        yield site
    finally:
        site.go.set()
        await runner.cleanup()
