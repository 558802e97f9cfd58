"""Http jobs on the server's side: what comes with a claim, run tokens, ends that are told with one, and circuits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web

from tests import PATIENCE
from tests.conftest import Api
from tests.flow.kit import Scene, WorkerHand, keys, told
from tests.node.test_dispatcher import tenant
from tocsin.flow.keys import RunTokens
from tocsin.flow.shared.transitions import Hint, Stop
from tocsin.node.server.app import build
from tocsin.node.server.protocol import HttpServer
from tocsin.node.whisper import Whisper
from tocsin.store.vault import MasterKeys, new_key
from tocsin.telemetry import SSRF_BLOCKED, SUPERSEDED

HTTP = {"kind": "http", "url": "https://api.example.com/orders", "callback": True}
ALL = 1 << 60  # as `last_claim`: every answer so far has arrived


async def hand(scene: Scene, key: str, **more: Any) -> WorkerHand:
    return await WorkerHand.register(scene.node, key, **{"targets": ["http", "process"]} | more)


async def claimed(scene: Scene, worker: WorkerHand, **spec: Any) -> dict[str, Any]:
    """A run of a new job, in the worker's hands."""
    await scene.ask(await scene.job(**{"target": HTTP} | spec))
    [run] = await taken(worker)
    return run


async def taken(worker: WorkerHand, count: int = 1) -> list[dict[str, Any]]:
    """So many runs; an order may end a poll before they come."""
    runs: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE):
        while len(runs) < count:
            runs += (await worker.claim(wait=PATIENCE, last_claim=ALL))["runs"]
    return runs


async def complete(scene: Scene, run: dict[str, Any], body: Any = None, token: str | None = None) -> tuple[int, Any]:
    api = Api(scene.node, run["token"] if token is None else token)
    reply = await api.http.post(f"/v1/runs/{run['run_id']}/complete", json={} if body is None else body)
    return reply.status_code, reply.json()


# ── whom a tenant may call ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_list_of_allowed_hosts_is_set_shown_and_refused(scene: Scene) -> None:
    acme = await tenant(scene, "acme")
    assert (await acme.get("/v1/tenants/acme"))["http_allow"] == []
    wanted = ["vault.internal", "10.1.0.0/16", "fd12:3456::/32"]
    shown = await scene.api.call("PATCH", "/v1/tenants/acme", json={"http_allow": wanted})
    assert shown["http_allow"] == wanted
    other = await scene.api.call("PATCH", "/v1/tenants/acme", json={"weight": 3})
    assert other["http_allow"] == wanted, "what is not named stays"
    for wrong in (["169.254.169.254"], ["a b"], ["8.8.8.8"], [1], "x", ["x" * 300], ["x"] * 201, None):
        await scene.api.call("PATCH", "/v1/tenants/acme", json={"http_allow": wrong}, expect=422)
    await acme.call("PATCH", "/v1/tenants/acme", json={"http_allow": []}, expect=403)
    assert (await scene.api.call("PATCH", "/v1/tenants/acme", json={"http_allow": []}))["http_allow"] == []


async def test_it_comes_with_the_http_runs_of_that_tenant_alone(live: Scene, worker_key: str) -> None:
    acme = await tenant(live, "acme")
    await live.api.call("PATCH", "/v1/tenants/acme", json={"http_allow": ["10.1.0.0/16"]})
    worker = await hand(live, worker_key)
    jobs = [await live.job(api, target=HTTP) for api in (acme, live.api)]
    for api, job in zip((acme, live.api), jobs, strict=True):
        await api.post(f"/v1/jobs/{job['id']}/runs")
    runs = await taken(worker, 2)
    found = {run["job_id"]: run.get("http_allow") for run in runs}
    assert found == {jobs[0]["id"]: ["10.1.0.0/16"], jobs[1]["id"]: None}


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_token_is_good_for_its_run_and_fence_and_no_other() -> None:
    tokens = RunTokens([b"k" * 32])
    token = tokens.make(3, "run-1", 1 << 40)
    who = tokens.read(token, "run-1")
    assert who is not None and (who.role, who.tenant_id, who.key_id, who.fence) == ("run", 3, "run-1", 1 << 40)
    assert tokens.read(token, "run-2") is None
    head, fence, mac = token.split(".")
    forged = [f"{head}.{int(fence) + 1}.{mac}", f"tcr_4.{fence}.{mac}", token[:-1], token + "0", "tcr_", "", mac]
    flipped = token[:-1] + ("0" if token[-1] != "0" else "1")
    assert all(tokens.read(wrong, "run-1") is None for wrong in (*forged, flipped, f"{head}.{fence}.{mac.upper()}é"))
    assert RunTokens([b"x" * 32]).read(token, "run-1") is None


def test_while_one_key_takes_the_place_of_another_both_are_believed() -> None:
    old, new = MasterKeys([first := new_key()]), MasterKeys([new_key(), first])
    before, after = RunTokens(old.derive_all("run tokens")), RunTokens(new.derive_all("run tokens"))
    assert after.read(before.make(1, "r", 5), "r") is not None
    assert before.read(after.make(1, "r", 5), "r") is None


async def test_a_function_has_a_token_and_may_end_its_run_with_it(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key, targets=["python"], functions=["a.b"])
    run = await claimed(live, worker, target={"kind": "python", "function": "a.b"})
    assert (await complete(live, run, {"outcome": "succeeded", "result": 3}))[0] == 200
    assert (await live.run(run["run_id"]))["result"] == 3


async def test_a_token_opens_nothing_but_the_end_of_its_own_run(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    one, other = await claimed(live, worker), await claimed(live, worker)
    holder = Api(live.node, one["token"])
    await holder.get(f"/v1/runs/{one['run_id']}", expect=403)
    await holder.get("/v1/jobs", expect=401)
    await holder.post(f"/v1/runs/{one['run_id']}/cancel", expect=403)
    await holder.post(f"/v1/runs/{other['run_id']}/complete", expect=401)
    await live.api.post(f"/v1/runs/{one['run_id']}/complete", expect=403)
    await worker.api.post(f"/v1/runs/{one['run_id']}/complete", expect=403)
    assert (await live.run(one["run_id"]))["state"] == "running"


# ── ends that are told with a token ──────────────────────────────────────────────────────────────────────────────


async def test_an_attempt_ends_by_its_own_word(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    run = await claimed(live, worker)
    assert await complete(live, run, {"result": {"rows": 42}}) == (
        200,
        {"id": run["run_id"], "outcome": "succeeded"},
    )
    shown = await live.run(run["run_id"])
    assert (shown["state"], shown["outcome"], shown["result"]) == ("succeeded", "succeeded", {"rows": 42})
    assert shown["started_at"] <= shown["finished_at"] and shown["worker"]
    status, _ = await complete(live, run, {"result": {"rows": 43}})
    assert status == 200, "a repeat is answered alike"
    assert (await complete(live, run, {"outcome": "failed"}))[1]["code"] == "superseded"
    again = await live.run(run["run_id"])
    assert again["result"] == {"rows": 42} and again["attempt"] == 1


async def test_a_failure_is_retried_like_any_other(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    run = await claimed(live, worker, retry={"delay": "PT1H", "jitter": "none", "give_up_on": ["hopeless"]})
    failed = {"outcome": "failed", "error": {"class": "render", "message": "no paper"}}
    assert (await complete(live, run, failed))[0] == 200
    shown = await live.run(run["run_id"])
    assert (shown["state"], shown["failures"]) == ("staged", 1)
    [attempt] = (await live.api.get(f"/v1/runs/{run['run_id']}/attempts"))["items"]
    assert attempt["error"] == {"class": "render", "message": "no paper"}
    await live.wake(run["run_id"])
    [second] = await taken(worker)
    assert second["run_id"] == run["run_id"]
    late, problem = await complete(live, run, {"result": 1})
    assert (late, problem["code"]) == (409, "superseded"), "the first attempt's token is worth nothing now"
    assert (await live.run(run["run_id"]))["state"] == "running"
    hopeless = {"outcome": "failed", "error": {"class": "hopeless"}}
    assert (await complete(live, second, hopeless))[0] == 200
    assert (await live.run(run["run_id"]))["state"] == "dead"


async def test_the_worker_is_told_and_needs_to_say_no_more(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    run = await claimed(live, worker)
    listening = asyncio.create_task(
        worker.say("claim", {"slots": 0, "listen": True, "last_claim": ALL, "wait": PATIENCE})
    )
    session = live.node.gateway._sessions[worker.id]
    async with asyncio.timeout(PATIENCE):
        while session.listening is None:  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.005)
    superseded = SUPERSEDED._value.get()
    assert (await complete(live, run))[0] == 200
    order = {"run_id": run["run_id"], "fence": run["fence"], "reason": "completed", "ended": True}
    assert (await listening)["stop"] == [order]
    assert SUPERSEDED._value.get() == superseded
    # One that does not know of this kind of order reports a cancel, and is told what that is worth.
    answer = await worker.report(finished=[told(run, "cancelled")])
    assert answer["superseded"] == [[run["run_id"], run["fence"]]]
    assert (await live.run(run["run_id"]))["state"] == "succeeded"


async def test_a_worker_that_nobody_told_hears_of_it_at_its_next_heartbeat(
    live: Scene, worker_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await hand(live, worker_key)
    gone, stays = await claimed(live, worker), await claimed(live, worker)
    monkeypatch.setattr(live.node.gateway, "stop", lambda _stops: None)
    assert (await complete(live, gone))[0] == 200
    answer = await worker.report(running=keys([gone, stays]), last_claim=ALL)
    assert answer["stop"] == [{"run_id": gone["run_id"], "fence": gone["fence"], "reason": "ended", "ended": True}]
    assert (await live.run(stays["run_id"]))["state"] == "running"
    quiet = await worker.report(running=keys([stays]), finished=[told(gone)], last_claim=ALL)
    assert quiet["stop"] == [], "what it reports itself needs no order"


def test_nodes_tell_each_other_what_has_ended_and_older_ones_understand_the_rest(scene: Scene) -> None:
    stops = [Stop("run-1", "worker-1", 7), Stop("run-2", "worker-2", 8, ended=True)]
    speaker = Whisper(scene.db, lambda *_: None, lambda *_: None, lambda _: None)
    speaker.say(stops=stops, drains=["worker-3"], keys=["key-4"])
    said, heard = speaker._next(), list[Any]()
    Whisper(scene.db, lambda *_: None, lambda *told: heard.append(told), heard.append)._on_message(said)
    assert heard == [(stops, ["worker-3"]), ["key-4"]]
    older = msgspec.json.decode(said, type=tuple[str, list[Any], list[tuple[str, str, int]], bool, list[str], Any, Any])
    assert older[2] == [("run-1", "worker-1", 7)], "what an older node would not understand is in a field of its own"


def test_what_nodes_tell_each_other_fits_into_a_notification_however_much_it_is(scene: Scene) -> None:
    now, many = datetime.now(UTC), range(150)
    names = [str(uuid.uuid4()) for _ in many]
    hints = [Hint(10**6 + n, 10**6, now, now) for n in many]
    stops = [Stop(name, name, 2**60) for name in names]
    speaker = Whisper(scene.db, lambda *_: None, lambda *_: None, lambda _: None)
    everywhere, heard = list[bool](), dict[str, list[Any]](stops=[], drains=[], keys=[])

    def stop(told: Sequence[Stop], drains: Sequence[str]) -> None:
        heard["stops"] += told
        heard["drains"] += drains

    listener = Whisper(scene.db, lambda _, all_: everywhere.append(all_), stop, heard["keys"].extend)
    speaker.say(hints, stops, names, names)
    while len(heard["drains"]) < len(many):
        message = speaker._next()
        assert len(message) < 8000
        listener._on_message(message)
    assert everywhere[0], "there was no room for the hints: whoever heard it looks everywhere"
    assert heard == {"stops": stops, "drains": names, "keys": names}


async def test_a_cancel_and_a_call_race_and_what_was_done_is_done(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    run = await claimed(live, worker)
    await live.api.post(f"/v1/runs/{run['run_id']}/cancel")
    assert (await complete(live, run, {"result": 1}))[0] == 200
    assert (await live.run(run["run_id"]))["state"] == "succeeded"
    other = await claimed(live, worker)
    await live.api.post(f"/v1/runs/{other['run_id']}/cancel")
    await worker.report(finished=[told(other, "cancelled")])
    assert (await complete(live, other))[0] == 409


async def test_many_calls_at_once_have_one_effect(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    run = await claimed(live, worker)
    answers = await asyncio.gather(*(complete(live, run, {"result": i}) for i in range(8)))
    assert {status for status, _ in answers} == {200}
    [row] = await live.rows("select outcome, result from history where run_id = $1", run["run_id"])
    assert row["outcome"] == "succeeded" and int(row["result"]) in range(8)


@pytest.mark.parametrize(
    "body", [[], {"outcome": "lost"}, {"color": 1}, {"error": {"message": "x"}}, {"error": {"class": ""}}]
)
async def test_an_end_that_is_none_is_refused(live: Scene, worker_key: str, body: Any) -> None:
    worker = await hand(live, worker_key)
    run = await claimed(live, worker)
    assert (await complete(live, run, body))[0] in (400, 422)
    assert (await live.run(run["run_id"]))["state"] == "running"


@contextlib.asynccontextmanager
async def endpoint() -> AsyncIterator[tuple[str, asyncio.Queue[web.Request]]]:
    """Takes what it is given (202) and says no more by itself."""
    taken: asyncio.Queue[web.Request] = asyncio.Queue()

    async def take(request: web.Request) -> web.Response:
        await taken.put(request)
        return web.Response(status=202)

    app = web.Application()
    app.router.add_post("/work", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/work", taken
    await runner.cleanup()


async def test_the_whole_way_with_a_real_worker(live: Scene, worker_key: str, tmp_path: Path) -> None:
    server = HttpServer(build(live.node))
    url = f"http://127.0.0.1:{await server.start('127.0.0.1', 0)}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("TOCSIN_")}
    env |= {"TOCSIN_URL": url, "TOCSIN_WORKER_KEY": worker_key, "TOCSIN_HOME": str(tmp_path)}
    allow = {"http_allow": ["127.0.0.1"]}
    await live.api.call("PATCH", "/v1/tenants/default", json=allow)
    async with endpoint() as (work, taken), asyncio.timeout(120):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tocsin", "worker", "--slots", "1", env=env
        )
        try:
            job = await live.job(target={"kind": "http", "url": work, "callback": True})
            for n in range(2):  # the second one needs the slot of the first
                [run_id] = await live.ask(job, args={"n": n})
                request = await taken.get()
                assert request.headers["Idempotency-Key"] == run_id and await request.json() == {"n": n}
                assert (await live.run(run_id))["state"] == "running"
                callback, token = (request.headers[f"Tocsin-{name}"] for name in ("Callback", "Run-Token"))
                async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}) as client:
                    answers = [await client.post(callback, json={"result": {"n": n}}) for _ in range(2)]
                assert [answer.status_code for answer in answers] == [200, 200] and callback.startswith(url)
                ended = await live.run(run_id)
                assert (ended["state"], ended["result"]) == ("succeeded", {"n": n})
        finally:
            process.terminate()
            await process.wait()
            await server.stop(grace=1.0)


# ── what an end means ────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_asks_to_be_left_alone_is_left_alone(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    retry = {"delay": "PT1S", "jitter": "none", "max_delay": "PT10M"}
    for asked, most in ((120.0, 120.0), (86_400.0, 600.0), (-5.0, 1.0)):
        run = await claimed(live, worker, retry=retry)
        error = {"class": "status_5xx", "message": "HTTP 503"}
        await worker.report(finished=[told(run, "failed", error=error, not_before=asked)])
        wait = await live.value("select extract(epoch from ready_at - now()) from runs where id = $1", run["run_id"])
        assert most - 30 < wait <= most


async def test_attempts_to_get_behind_the_walls_are_counted(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    run, before = await claimed(live, worker), SSRF_BLOCKED._value.get()
    error = {"class": "refused_address", "message": "169.254.169.254 (link-local) is not dialled"}
    await worker.report(finished=[told(run, "failed", error=error)])
    assert SSRF_BLOCKED._value.get() == before + 1


async def test_a_host_is_a_circuit_that_answers_of_4xx_do_not_open(live: Scene, worker_key: str) -> None:
    worker = await hand(live, worker_key)
    job = await live.job(target=HTTP, retry={"max_attempts": 1})
    own = await live.job(target=HTTP, circuit="mine")
    moved = await live.api.call("PATCH", f"/v1/jobs/{own['id']}", json={"circuit": None})
    assert moved["circuit"] is None
    names = [c["name"] for c in (await live.api.get("/v1/circuits"))["items"]]
    assert sorted(names) == ["api.example.com", "mine"]
    for error_class, state in (("status_4xx", "closed"), ("status_5xx", "open")):
        await live.ask(job, 20)
        runs = await taken(worker, 20)
        error = {"class": error_class, "message": ""}
        await worker.report(finished=[told(run, "failed", error=error) for run in runs])
        assert (await live.api.get("/v1/circuits/api.example.com"))["state"] == state
