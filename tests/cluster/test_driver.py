"""The driver against a server that fails, forgets to answer, and repeats itself: no outcome stays unknown."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from . import driver as driving
from . import ledger
from .checker import check
from .driver import Driver, Load, run_args, run_load, stop_schedules, wait_until_ended
from .evidence import Evidence, Target, collect


class Server:
    """A Tocsin in miniature that does each run at once, and answers only now and then."""

    def __init__(self, job_ledger: Path, fault: Callable[[random.Random], str | None]) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.keys: dict[str, Any] = {}
        self._book = ledger.Appender(job_ledger)
        self._fault = fault
        self._rng = random.Random(1)

    def handle(self, request: httpx.Request) -> httpx.Response:
        fault = self._fault(self._rng)
        if fault == "refused":
            raise httpx.ConnectError("refused", request=request)
        if fault == "busy":
            return httpx.Response(503, json={"code": "unavailable"})
        answer = self._get(request) if request.method == "GET" else self._post(request)
        if fault == "silent":
            raise httpx.ReadError("cut", request=request)
        return answer

    def _post(self, request: httpx.Request) -> httpx.Response:
        key = request.headers["idempotency-key"]
        if key not in self.keys:
            self.keys[key] = self._make(request.url.path, json.loads(request.content))
        return httpx.Response(201, json=self.keys[key])

    def _make(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/jobs":
            job = {"schedule": None, "max_concurrency": None, "id": f"j{len(self.jobs)}", "version": 1}
            self.jobs[job["id"]] = job | body | {"created_at": _now(), "state": "active"}
            return self.jobs[job["id"]] | ({"run": self._run(job["id"])} if "schedule" not in body else {})
        job_id = path.split("/")[3]
        if path.endswith("/cancel"):
            return self.jobs[job_id]
        return {"items": [self._run(job_id, "api") for _ in body["runs"]]}

    def _run(self, job_id: str, trigger: str = "schedule") -> dict[str, Any]:
        run = {"id": f"r{len(self.runs)}", "job_id": job_id, "state": "succeeded", "trigger": trigger}
        run |= {"attempt": 1, "fence": 7, "max_attempts": 4, "scheduled_for": _now(), "ready_at": _now()}
        self.runs[str(run["id"])] = run
        for phase in ("start", "end"):
            who = {"run_id": run["id"], "job_id": job_id, "attempt": 1, "fence": 7, "phase": phase, "ok": True}
            self._book.write(who | {"boottime_ns": len(self.runs), "wall_us": ledger.wall_us() + 1})
        return run

    def _get(self, request: httpx.Request) -> httpx.Response:
        parts = request.url.path.split("/")[2:]
        if parts == ["runs"]:
            job_id = request.url.params.get("job")
            runs = [r for r in self.runs.values() if job_id in (None, r["job_id"])]
            return httpx.Response(200, json={"items": runs, "next_cursor": None})
        if parts == ["workers"]:
            return httpx.Response(200, json={"items": [{"id": "w", "running": 0}], "next_cursor": None})
        if parts == ["jobs"]:
            return httpx.Response(200, json={"items": list(self.jobs.values()), "next_cursor": None})
        return httpx.Response(200, json=self.jobs[parts[1]]) if parts[1] in self.jobs else httpx.Response(404)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def seldom_answers(rng: random.Random) -> str | None:
    return rng.choice(["refused", "busy", "silent", None])


def plug_in(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Put the server behind every client made from here on."""
    real, transport = httpx.AsyncClient, httpx.MockTransport(server.handle)
    monkeypatch.setattr(httpx, "AsyncClient", lambda **how: real(transport=transport, **how))


def quick(job_ledger: Path) -> Load:
    return Load(job_ledger, seconds=0.2, batches_per_second=40, once_per_second=20, every=())


async def a_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Server, Driver, driving.Made]:
    monkeypatch.setattr(driving.random, "uniform", lambda low, high: 0.001)
    server = Server(tmp_path / "jobs", seldom_answers)
    plug_in(monkeypatch, server)
    async with Driver(["http://a", "http://b"], "key", tmp_path / "client") as driver:
        made = await run_load(driver, quick(tmp_path / "jobs"))
        await stop_schedules(driver, made)
        await wait_until_ended(driver, made, 5)
    return server, driver, made


async def look(monkeypatch: pytest.MonkeyPatch, server: Server, driver: Driver, tmp_path: Path) -> Evidence:
    server._fault = lambda rng: None
    target = Target("http://a", "key", tag=driver.tag, apart=0, settle=0)
    return await collect(target, [tmp_path / "client"], [tmp_path / "jobs"])


async def test_every_request_is_answered_and_done_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server, driver, made = await a_round(monkeypatch, tmp_path)
    assert driver.repeats > 10
    assert (made.runs, len(made.once), len(made.manual)) == (80, 4, 4)
    evidence = await look(monkeypatch, server, driver, tmp_path)
    assert evidence.unanswered() == []
    assert len(evidence.runs) == 84
    assert [str(b) for b in check(evidence)] == []


async def test_a_server_that_forgets_its_keys_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Forgetful(dict[str, Any]):
        def __contains__(self, key: object) -> bool:
            return False

    monkeypatch.setattr(Server, "__init__", _forgetful_init(Server.__init__, Forgetful))
    server, driver, _ = await a_round(monkeypatch, tmp_path)
    evidence = await look(monkeypatch, server, driver, tmp_path)
    assert "I1" in {b.invariant for b in check(evidence)}


def _forgetful_init(init: Any, keys: type) -> Any:
    def replaced(self: Server, *args: Any) -> None:
        init(self, *args)
        self.keys = keys()

    return replaced


async def test_an_unanswered_request_stays_open_in_the_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plug_in(monkeypatch, Server(tmp_path / "jobs", lambda rng: "refused"))
    async with Driver(["http://a"], "key", tmp_path / "client", patience=0) as driver:
        with pytest.raises(driving.GaveUp):
            await driver.create_job({"target": {}})
    assert [r["phase"] for r in ledger.read(tmp_path / "client")] == ["intent"]


async def test_a_refusal_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(tmp_path / "jobs", lambda rng: None)
    monkeypatch.setattr(server, "_post", lambda request: httpx.Response(422, json={"code": "invalid"}))
    plug_in(monkeypatch, server)
    async with Driver(["http://a"], "key", tmp_path / "client") as driver:
        with pytest.raises(httpx.HTTPStatusError):
            await driver.create_job({"target": {}})
    assert ledger.read(tmp_path / "client")[1]["status"] == 422


async def test_waiting_has_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server(tmp_path / "jobs", lambda rng: None)
    plug_in(monkeypatch, server)
    async with Driver(["http://a"], "key", tmp_path / "client") as driver:
        job_id = await driver.create_job({"target": {}})
        server.runs["r0"]["state"] = "running"
        with pytest.raises(TimeoutError):
            await wait_until_ended(driver, driving.Made(once=[job_id]), 0)


def test_some_runs_fail_first() -> None:
    rng = random.Random(0)
    args = [run_args(Load("x"), rng) for _ in range(300)]
    assert 10 < sum(a["fail_attempts"] for a in args) < 60
    assert all(0 <= a["seconds"] <= 0.3 for a in args)


def test_the_round_settles_when_asked_to(tmp_path: Path) -> None:
    evidence = Evidence([], [], {}, [], {}, [], datetime.now(UTC))
    evidence.client.append({"n": 1, "phase": "intent", "op": "cancel_job", "job_id": "j", "wall_us": 60_000_000})
    assert evidence.window_end("j") == datetime(1970, 1, 1, 0, 0, 45, tzinfo=UTC)
    assert evidence.window_end("k") > datetime.now(UTC) - timedelta(minutes=1)
