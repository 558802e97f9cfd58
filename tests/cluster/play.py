"""What a story of crashes is told with: a server that is killed and restarted, and those who speak to it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from .cluster import Server, until

Document = dict[str, Any]
Act = Callable[[], Awaitable[Any]]


class Play:
    """One database, one server that is killed and restarted, and a client of it."""

    def __init__(
        self, server: Server, api: httpx.AsyncClient, hand: httpx.AsyncClient, faults: tuple[str, ...]
    ) -> None:
        self.server, self.faults = server, faults
        self._api, self._hand = api, hand
        self.worker_id = ""

    async def survive(self, act: Act) -> Any:
        """Give the command to a server that dies at each fault in turn; then to one that lives, for its answer."""
        for fault, following in zip(self.faults, [*self.faults[1:], None], strict=True):
            await until(f"the server dies at {fault}", lambda: self._dies(act), every=0.02)
            assert await self.server.ended() == -signal.SIGKILL
            if following is not None:
                self.server.spawn_with(following)
        await self.server.start()
        return await act()

    async def _dies(self, act: Act) -> bool:
        with contextlib.suppress(httpx.TransportError):
            await act()
        return not self.server.alive

    async def get(self, path: str, **query: Any) -> Document:
        return _told(await self._api.get(path, params=query))

    async def post(self, path: str, body: Document, key: str | None = None) -> Document:
        headers = {"idempotency-key": key} if key else {}
        return _told(await self._api.post(path, json=body, headers=headers))

    async def send(self, method: str, path: str, body: Document, key: str) -> Document:
        return _told(await self._api.request(method, path, json=body, headers={"idempotency-key": key}))

    async def job(self, **spec: Any) -> str:
        target = {"kind": "process", "command": ["true"]}
        job = await self.post("/v1/jobs", {"target": target, "schedule": {"manual": True}} | spec)
        return str(job["id"])

    async def queued(self, count: int, **spec: Any) -> tuple[str, list[str]]:
        """A job with queued runs."""
        job_id = await self.job(**spec)
        made = await self.post(f"/v1/jobs/{job_id}/runs/batch", {"runs": [{}] * count})
        return job_id, made["ids"]

    async def runs(self, job_id: str) -> list[Document]:
        return (await self.get("/v1/runs", job=job_id, limit=500))["items"]  # type: ignore[no-any-return]

    # ── a worker, by hand ────────────────────────────────────────────────────────────────────────────────────────

    async def register(self) -> None:
        body = {"name": "by-hand", "slots": 8, "targets": ["process"]}
        self.worker_id = (await self._work("register", body))["worker_id"]

    async def claim(self, last_claim: int = 0) -> Document:
        """Ask until something comes."""

        async def some() -> Document | None:
            answer = await self.ask(last_claim, wait=1)
            return answer if answer["runs"] else None

        found = await until("a claim brings runs", some)
        assert found is not None
        return found

    async def ask(self, last_claim: int, wait: float = 0.2) -> Document:
        """Ask once."""
        body = {"slots": 8, "wait": wait, "last_claim": last_claim}
        return await self._work(f"{self.worker_id}/claim", body)

    async def report(self, **body: Any) -> Document:
        return await self._work(f"{self.worker_id}/report", body)

    async def note(self, *notes: Document) -> Document:
        return await self._work(f"{self.worker_id}/notes", {"notes": list(notes)})

    async def _work(self, path: str, body: Document) -> Document:
        return _told(await self._hand.post(f"/v1/worker/{path}", json=body))


def _told(reply: httpx.Response) -> Document:
    assert reply.is_success, f"{reply.request.method} {reply.request.url.path}: {reply.status_code} {reply.text}"
    return reply.json() | {"replayed": "idempotent-replayed" in reply.headers}


STORIES: dict[str, tuple[tuple[str, ...], Callable[[Play], Awaitable[None]]]] = {}


def story(*faults: str) -> Callable[[Callable[[Play], Awaitable[None]]], None]:
    """Tell it with a server that dies at each of these in turn."""

    def note(tell: Callable[[Play], Awaitable[None]]) -> None:
        STORIES[tell.__name__] = (tuple(f if "=" in f else f"{f}=kill:1" for f in faults), tell)

    return note


def end(run: Document, outcome: str) -> Document:
    """How a worker says that a run ended."""
    return {k: run[k] for k in ("run_id", "attempt", "fence")} | {"outcome": outcome}
