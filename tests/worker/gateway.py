"""A scripted gateway: speaks the worker protocol over real HTTP, hands out what a test queues, records all it hears."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from aiohttp import web

from tests import PATIENCE
from tocsin import wire
from tocsin.clock import iso
from tocsin.model.loglines import parted

_pack = msgspec.msgpack.encode


class Gateway:
    """One server's worth of protocol. `report_faults` and `log_faults` are answers to give instead, in order."""

    def __init__(self, lease: float = 10.0, heartbeat: float = 1.0) -> None:
        self.lease, self.heartbeat = lease, heartbeat
        self.registered: list[wire.Register] = []
        self.worker_ids: list[str] = []
        self.queue: asyncio.Queue[tuple[wire.ClaimedRun, Any]] = asyncio.Queue()
        self.reports: list[wire.Report] = []
        self.report_bodies: list[bytes] = []
        self.finished: dict[str, wire.Finished] = {}
        self.returned: list[wire.RunKey] = []
        self.log_lines: dict[str, list[wire.LogLine]] = {}
        self.log_tenants: dict[str, set[int]] = {}
        self.shipped_by: dict[str, set[str]] = {}  # worker ids, by run
        self.stops: list[wire.StopOrder] = []
        self.drain = False
        self.deaf = False  # answer nothing any more
        self.superseded: set[str] = set()
        self.report_faults: list[str] = []
        self.log_faults: list[tuple[int, dict[str, Any]]] = []
        self.refuse: tuple[int, dict[str, Any]] | None = None
        self.unknown: set[str] = set()
        self.notes: dict[str, list[wire.RunNote]] = {}
        self.note_faults: list[tuple[int, dict[str, Any]]] = []
        self.notes_go_on = asyncio.Event()  # until then they wait for their answer
        self.notes_go_on.set()
        self.notes_waiting = 0
        self.jobs: dict[str, dict[str, Any]] = {}
        self.puts: list[str] = []
        self.workflows: dict[str, Any] = {}
        self.refuse_job: tuple[int, dict[str, Any]] | None = None
        self.payloads: dict[str, bytes] = {}
        self.payloads_wait = asyncio.Event()  # fetches of payloads wait until this is set
        self.payloads_wait.set()
        self.payloads_asked = 0
        self.parents: dict[tuple[str, str], Any] = {}  # by (run_id, token)
        self.claims_open = 0
        self.claims: list[wire.Claim] = []
        self.cut_claim = False  # lose the answer that has the next run
        self.cut_at = ""
        self.changed = asyncio.Condition()
        self._claim_ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Gateway:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/worker/register", self._register)
        app.router.add_post("/v1/worker/{id}/claim", self._claim)
        app.router.add_post("/v1/worker/{id}/report", self._report)
        app.router.add_post("/v1/worker/{id}/logs", self._logs)
        app.router.add_post("/v1/worker/{id}/notes", self._notes)
        app.router.add_put("/v1/jobs/by-name/{name}", self._put_job)
        app.router.add_put("/v1/workflows/by-name/{name}", self._put_workflow)
        app.router.add_get("/v1/jobs", self._list_jobs)
        app.router.add_get("/v1/payloads/{token}", self._payload)
        app.router.add_get("/v1/runs/{id}/parents", self._parents)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        self.deaf = False
        await self._runner.cleanup()

    # ── what a test does ─────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        target: dict[str, Any],
        *,
        timeout: float = 30.0,
        args: Any = None,
        in_seconds: float = -0.001,
        checkpoint: Any = None,
        resources: dict[str, float] | None = None,
        **more: Any,
    ) -> wire.ClaimedRun:
        n = next(self._numbers)
        now = datetime.now(UTC)
        run = wire.ClaimedRun(
            run_id=f"run-{n}",
            attempt=1,
            fence=(1 << 40) + n,
            start_at=iso(now + timedelta(seconds=in_seconds)),
            timeout_ms=int(timeout * 1000),
            job_id=f"job-{n}",
            job_name=f"name-{n}",
            scheduled_for=iso(now),
            spec_ref=f"job-{n}:1",
            args=args,
            token=f"token-{n}",
            checkpoint=checkpoint,
            **more,
        )
        self.queue.put_nowait((run, {"target": target, "resources": resources or {}, "unknown_field": 1}))
        return run

    def process(self, *command: str, **more: Any) -> wire.ClaimedRun:
        options = {k: more.pop(k) for k in ("env", "cwd", "stdin") if k in more}
        return self.submit({"kind": "process", "command": list(command), **options}, **more)

    def python(self, function: str, *args: Any, **more: Any) -> wire.ClaimedRun:
        kwargs = more.pop("kwargs", {})
        return self.submit({"kind": "python", "function": function, "args": list(args), "kwargs": kwargs}, **more)

    async def until(self, condition: Callable[[], Any], within: float = PATIENCE) -> Any:
        """Wait until the condition holds, looking again whenever the worker has said something."""
        async with asyncio.timeout(within), self.changed:
            await self.changed.wait_for(condition)
            return condition()

    async def end_of(self, run: wire.ClaimedRun, within: float = PATIENCE) -> wire.Finished:
        found: wire.Finished = await self.until(lambda: self.finished.get(run.run_id), within)
        return found

    async def line_of(self, run: wire.ClaimedRun, text: str) -> str:
        """Wait for a log line that contains the text."""
        found: str = await self.until(
            lambda: next((line[3] for line in self.log_lines.get(run.run_id, []) if text in line[3]), None)
        )
        return found

    def text_of(self, run: wire.ClaimedRun, stream: str | None = None) -> list[str]:
        return [parted(line[3])[0] for line in self.log_lines.get(run.run_id, []) if stream in (None, line[1])]

    async def order_at_once(self, *, drain: bool = False) -> None:
        """Tell whoever listens of the orders there are."""
        self.drain = drain
        await self._tell()

    def order_stop(self, run: wire.ClaimedRun) -> None:
        self.stops.append(wire.StopOrder(run_id=run.run_id, fence=run.fence, reason="cancel"))

    # ── the protocol ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _register(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer the-key"
        assert request.content_type == "application/msgpack"
        if self.refuse is not None:
            return _problem(*self.refuse)
        self.registered.append(msgspec.msgpack.decode(await request.read(), type=wire.Register))
        worker_id = f"worker-{len(self.registered)}"
        self.worker_ids.append(worker_id)
        await self._tell()
        return _answer(wire.Registered(worker_id=worker_id, lease_seconds=self.lease, heartbeat_seconds=self.heartbeat))

    async def _claim(self, request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=wire.Claim)
        assert body.shared_specs
        self.claims.append(body)
        if (gone := await self._gone(request)) is not None:
            return gone
        self.claims_open += 1
        await self._tell()
        try:
            taken = [] if body.listen else await self._take(body.slots + body.held, body.wait)
            if body.listen:
                with contextlib.suppress(TimeoutError):
                    await self.until(lambda: self.stops or self.drain, body.wait)
        finally:
            self.claims_open -= 1
            await self._tell()
        if self.cut_claim and taken and request.transport is not None:
            self.cut_claim, self.cut_at = False, iso(datetime.now(UTC))
            request.transport.close()
        specs = {run.spec_ref: msgspec.Raw(_pack(spec)) for run, spec in taken}
        return _answer(
            wire.ClaimAnswer(
                claim_id=next(self._claim_ids),
                runs=[run for run, _ in taken],
                specs=specs,  # type: ignore[arg-type]
                stop=self.stops if body.listen else [],
                drain=self.drain and body.listen,
            )
        )

    async def _take(self, slots: int, wait: float) -> list[tuple[wire.ClaimedRun, Any]]:
        until = time.monotonic() + wait
        while slots and time.monotonic() < until:
            try:
                taken = [await asyncio.wait_for(self.queue.get(), until - time.monotonic())]
            except TimeoutError:
                break
            while len(taken) < slots and not self.queue.empty():
                taken.append(self.queue.get_nowait())
            return taken
        return []

    async def _gone(self, request: web.Request) -> web.Response | None:
        if self.deaf:
            await asyncio.sleep(3600)
        if request.match_info["id"] in self.unknown:
            return _problem(410, {"code": "unknown_worker"})
        return None

    async def _report(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.report_bodies.append(raw)
        if (gone := await self._gone(request)) is not None:
            await self._tell()
            return gone
        fault = self.report_faults.pop(0) if self.report_faults else ""
        if fault == "503":
            await self._tell()
            return _problem(503, {"code": "unavailable"})
        body = msgspec.msgpack.decode(raw, type=wire.Report)
        self.reports.append(body)
        self.returned.extend(body.returned)
        for end in body.finished:
            self.finished.setdefault(end.run_id, end)
        await self._tell()
        if fault == "lost_reply":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        keys = [(end.run_id, end.fence) for end in body.finished]
        return _answer(
            wire.ReportAnswer(
                accepted=[key for key in keys if key[0] not in self.superseded],
                superseded=[key for key in keys if key[0] in self.superseded],
                stop=self.stops,
                drain=self.drain,
                now=iso(datetime.now(UTC)),
            )
        )

    async def _logs(self, request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=wire.LogShipment)
        if (gone := await self._gone(request)) is not None:
            return gone
        if self.log_faults:
            status, problem = self.log_faults.pop(0)
            return _problem(status, problem)
        for chunk in body.chunks:
            self.log_tenants.setdefault(chunk.run_id, set()).add(chunk.tenant)
            lines = self.log_lines.setdefault(chunk.run_id, [])
            if chunk.offset > len(lines):
                return _problem(409, {"code": "log_gap", "expected_offset": len(lines)})
            lines.extend(chunk.lines[len(lines) - chunk.offset :])
            self.shipped_by.setdefault(chunk.run_id, set()).add(request.match_info["id"])
        await self._tell()
        return web.json_response({})

    async def _notes(self, request: web.Request) -> web.Response:
        body = msgspec.msgpack.decode(await request.read(), type=wire.Notes)
        self.notes_waiting += 1
        await self._tell()
        await self.notes_go_on.wait()
        if (gone := await self._gone(request)) is not None:
            return gone
        if self.note_faults:
            status, problem = self.note_faults.pop(0)
            return _problem(status, problem)
        kept = [note for note in body.notes if note.run_id not in self.superseded]
        for note in kept:
            self.notes.setdefault(note.run_id, []).append(note)
        await self._tell()
        return _answer(wire.NotesAnswer(kept=[(note.run_id, note.fence) for note in kept]))

    async def _put_job(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer editor-key"
        if self.refuse_job is not None:
            return _problem(*self.refuse_job)
        name, body = request.match_info["name"], await request.json()
        self.puts.append(name)
        before = self.jobs.get(name)
        version = 1 if before is None else before["version"] + (before["body"] != body)
        self.jobs[name] = {"name": name, "version": version, "schedule": body["schedule"], "body": body}
        await self._tell()
        return web.json_response(self.jobs[name])

    async def _put_workflow(self, request: web.Request) -> web.Response:
        body = self.workflows[request.match_info["name"]] = await request.json()
        return web.json_response({"name": body["name"], "version": 1, "schedule": body["schedule"]})

    async def _list_jobs(self, request: web.Request) -> web.Response:
        key, _, value = request.query["tag"].partition(":")
        found = [job for job in self.jobs.values() if job["body"].get("tags", {}).get(key) == value]
        return web.json_response({"items": found if request.query["state"] == "active" else [], "next_cursor": None})

    async def _parents(self, request: web.Request) -> web.Response:
        token = request.headers["Authorization"].removeprefix("Bearer ")
        found = self.parents.get((request.match_info["id"], token))
        return web.json_response(found) if found is not None else web.Response(status=404)

    async def _payload(self, request: web.Request) -> web.Response:
        self.payloads_asked += 1
        await self._tell()
        await self.payloads_wait.wait()
        found = self.payloads.get(request.match_info["token"])
        return web.Response(status=404) if found is None else web.Response(body=found, content_type="application/json")


def _answer(value: Any) -> web.Response:
    return web.Response(body=wire.encode_msgpack(value), content_type="application/msgpack")


def _problem(status: int, body: dict[str, Any]) -> web.Response:
    return web.json_response(body, status=status, content_type="application/problem+json")
