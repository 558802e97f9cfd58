"""`Client`: the SDK over `httpx.Client`, for scripts and threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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
from tocsin.client.stream import LOOK_AGAIN, SILENCE_SECONDS, Event, Patience, Stream, id_of, is_over, may_end

if TYPE_CHECKING:
    from tocsin.client.job import Run


class Client(Calls):
    """A connection to Tocsin; safe to share between threads. Without arguments it finds url and key by itself.

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
        self._http = httpx.Client(
            base_url=found.url,
            headers=headers(found, tenant),
            timeout=timeouts(timeout),
            verify=found.trust(),
        )

    def send(self, call: Call[T]) -> T:
        """Send one call and answer what was read; repeats it where that is safe."""
        flow = exchange(call, self._retries)
        request = next(flow)
        while True:
            try:
                request = flow.send(self._deliver(request))
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def items(self, call: Call[Page]) -> Iterator[Document]:
        """The items of all pages of a list."""
        following: Call[Page] | None = call
        while following is not None:
            page = self.send(following)
            yield from page.items
            following = next_page(following, page)

    def follow(self, call: Call[Document], patience: Callable[[], float] = lambda: SILENCE_SECONDS) -> Iterator[Event]:
        """The events of a stream, taken up again wherever it breaks; `patience`: for how long to listen to silence."""
        stream = Stream(call, self._retries)
        while True:
            request = stream.request()
            time.sleep(request.pause)
            try:
                with self._http.stream(
                    request.method,
                    request.path,
                    params=request.query,
                    headers=request.headers,
                    timeout=timeouts(patience()),
                ) as reply:
                    if reply.status_code == 200:
                        for part in reply.iter_bytes():
                            yield from stream.feed(part)
                            patience()
                        problem: ApiError | Unreachable = Unreachable(f"{self.url} ended the stream")
                    else:
                        content = reply.read()
                        problem = refusal(Answer(reply.status_code, reply.headers, content))
            except httpx.RequestError as error:
                problem = unreachable(self.url, error)
            stream.broke(problem)

    def wait(self, run: str | Mapping[str, Any] | Run[Any], timeout: float | None = None) -> Document:
        """The run (or the one of this id) when it has ended, however; `TimeoutError` after `timeout` seconds."""
        run_id, patience = id_of(run), Patience(timeout)
        found = self.get_run(run_id)
        if is_over(found):
            return found
        try:
            for event in self.follow(calls.events(type="run", job=found["job_id"]), patience):
                if may_end(event, run_id) and is_over(found := self.get_run(run_id)):
                    return found
        except ApiError:  # too many listen
            while not is_over(found):
                time.sleep(min(LOOK_AGAIN, patience()))
                found = self.get_run(run_id)
        return found

    def wait_workflow(self, run: str | Mapping[str, Any], timeout: float | None = None) -> Document:
        """A workflow's run when it has ended, however, with its graph; `TimeoutError` after `timeout` seconds."""
        found = self.get_workflow_run(id_of(run))
        self.wait(found["head_run_id"], timeout)  # one that is retried goes on with another head
        return self.get_workflow_run(found["id"])

    def _deliver(self, request: Request) -> Answer | Unreachable:
        time.sleep(request.pause)
        try:
            reply = self._http.request(
                request.method,
                request.path,
                params=request.query,
                content=request.content,
                headers=request.headers,
            )
        except httpx.RequestError as error:
            return unreachable(self.url, error)
        return Answer(reply.status_code, reply.headers, reply.content)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
