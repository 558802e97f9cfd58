"""`AsyncClient`: the SDK over `httpx.AsyncClient`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from tocsin.client import calls, credentials
from tocsin.client.core import (
    Answer,
    ApiError,
    Call,
    Document,
    Page,
    Request,
    Retries,
    T,
    Unreachable,
    exchange,
    next_page,
    refusal,
)
from tocsin.client.facade import Calls
from tocsin.client.session import DEFAULT_RETRIES, DEFAULT_TIMEOUT, headers, timeouts, unreachable
from tocsin.client.stream import LOOK_AGAIN, SILENCE_SECONDS, Event, Stream, id_of, is_over, may_end

if TYPE_CHECKING:
    from tocsin.client.job import Run


class AsyncClient(Calls):
    """A connection to Tocsin for one event loop. Without arguments it finds url and key by itself.

    `tenant`: act for this tenant (platform keys only).
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        tenant: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: Retries = DEFAULT_RETRIES,
    ) -> None:
        found = credentials.find(url, key)
        self.url = found.url
        self._retries = retries
        self._http = httpx.AsyncClient(
            base_url=found.url,
            headers=headers(found, tenant),
            timeout=timeouts(timeout),
            verify=found.trust(),
        )

    async def send(self, call: Call[T]) -> T:
        """Send one call and answer what was read; repeats it where that is safe."""
        flow = exchange(call, self._retries)
        request = next(flow)
        while True:
            try:
                request = flow.send(await self._deliver(request))
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    async def items(self, call: Call[Page]) -> AsyncIterator[Document]:
        """The items of all pages of a list."""
        following: Call[Page] | None = call
        while following is not None:
            page = await self.send(following)
            for item in page.items:
                yield item
            following = next_page(following, page)

    async def follow(self, call: Call[Document]) -> AsyncGenerator[Event, None]:
        """The events of a stream, taken up again wherever it breaks."""
        stream = Stream(call, self._retries)
        while True:
            request = stream.request()
            await asyncio.sleep(request.pause)
            try:
                async with self._http.stream(
                    request.method,
                    request.path,
                    params=request.query,
                    headers=request.headers,
                    timeout=timeouts(SILENCE_SECONDS),
                ) as reply:
                    if reply.status_code == 200:
                        async for part in reply.aiter_bytes():
                            for event in stream.feed(part):
                                yield event
                        problem: ApiError | Unreachable = Unreachable(f"{self.url} ended the stream")
                    else:
                        content = await reply.aread()
                        problem = refusal(Answer(reply.status_code, reply.headers, content))
            except httpx.RequestError as error:
                problem = unreachable(self.url, error)
            stream.broke(problem)

    async def wait(self, run: str | Mapping[str, Any] | Run[Any], timeout: float | None = None) -> Document:
        """The run (or the one of this id) when it has ended, however; `TimeoutError` after `timeout` seconds."""
        run_id = id_of(run)
        async with asyncio.timeout(timeout):
            found = await self.get_run(run_id)
            if is_over(found):
                return found
            try:
                async with aclosing(self.follow(calls.events(type="run", job=found["job_id"]))) as events:
                    async for event in events:
                        if may_end(event, run_id) and is_over(found := await self.get_run(run_id)):
                            return found
            except ApiError:  # too many listen
                while not is_over(found):
                    await asyncio.sleep(LOOK_AGAIN)
                    found = await self.get_run(run_id)
        return found

    async def wait_workflow(self, run: str | Mapping[str, Any], timeout: float | None = None) -> Document:
        """A workflow's run when it has ended, however, with its graph; `TimeoutError` after `timeout` seconds."""
        found = await self.get_workflow_run(id_of(run))
        await self.wait(found["head_run_id"], timeout)  # one that is retried goes on with another head
        return await self.get_workflow_run(found["id"])

    async def _deliver(self, request: Request) -> Answer | Unreachable:
        await asyncio.sleep(request.pause)
        try:
            reply = await self._http.request(
                request.method,
                request.path,
                params=request.query,
                content=request.content,
                headers=request.headers,
            )
        except httpx.RequestError as error:
            return unreachable(self.url, error)
        return Answer(reply.status_code, reply.headers, reply.content)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
