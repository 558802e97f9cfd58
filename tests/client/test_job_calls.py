"""Both clients on a real server: patches, documents by name, many at once, versions, `if_match`, dead letters."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.conftest import Cluster
from tests.flow.kit import Scene, end_of
from tocsin.client import ApiError, AsyncClient, Client

JOB = {"schedule": {"manual": True}, "target": {"kind": "process", "command": ["true"]}}

Ask = Callable[..., Coroutine[Any, Any, Any]]


@pytest.fixture(params=["Client", "AsyncClient"])
def ask(request: pytest.FixtureRequest, served: str, cluster: Cluster) -> Ask:
    """One call by its name, with a client of either kind; a list is read to its end."""
    key = cluster.keys["key"]

    def ask_sync(method: str, *args: Any, **kwargs: Any) -> Any:
        with Client(served, key) as client:
            answer = getattr(client, method)(*args, **kwargs)
            return list(answer) if inspect.isgenerator(answer) else answer

    async def ask_in_thread(method: str, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(ask_sync, method, *args, **kwargs)

    async def ask_async(method: str, *args: Any, **kwargs: Any) -> Any:
        async with AsyncClient(served, key) as client:
            answer = getattr(client, method)(*args, **kwargs)
            return [item async for item in answer] if inspect.isasyncgen(answer) else await answer

    return ask_in_thread if request.param == "Client" else ask_async


async def refused(call: Coroutine[Any, Any, Any]) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        await call
    return caught.value.status, caught.value.code


async def test_a_patch_makes_a_version_and_if_match_guards_it(ask: Ask) -> None:
    job = await ask("create_job", JOB | {"tags": {"a": "b", "c": "d"}})
    changed = await ask("update_job", job["id"], {"priority": 9, "tags": {"a": None}}, if_match=1)
    assert (changed["version"], changed["priority"], changed["tags"]) == (2, 9, {"c": "d"})
    assert await refused(ask("update_job", job["id"], {"priority": 1}, if_match=1)) == (412, "precondition_failed")
    assert (await ask("update_job", job["id"], {"priority": 9}))["version"] == 2
    assert (await ask("get_job", job["id"]))["priority"] == 9


async def test_a_patch_with_a_key_has_one_effect_also_when_its_version_is_past(ask: Ask) -> None:
    job = await ask("create_job", JOB)
    again = {"if_match": 1, "idempotency_key": "k"}
    first = await ask("update_job", job["id"], {"priority": 9}, **again)
    second = await ask("update_job", job["id"], {"priority": 9}, **again)
    assert (first["version"], second["version"]) == (2, 2)
    assert await refused(ask("update_job", job["id"], {"priority": 8}, **again)) == (422, "idempotency_mismatch")


async def test_a_document_by_name_is_made_kept_and_replaced(ask: Ask) -> None:
    made = await ask("put_job", "nightly", JOB | {"priority": 9})
    assert (made["name"], made["version"]) == ("nightly", 1)
    assert (await ask("put_job", "nightly", JOB | {"priority": 9}))["version"] == 1
    changed = await ask("put_job", "nightly", JOB, if_match=1)
    assert (changed["id"], changed["version"], changed["priority"]) == (made["id"], 2, 500)
    assert (await refused(ask("put_job", "nightly", JOB | {"priority": 1}, if_match=1)))[0] == 412
    assert (await refused(ask("put_job", "unknown", JOB, if_match=1)))[0] == 412
    assert await ask("get_named_job", "nightly") == changed
    assert await refused(ask("get_named_job", "unknown")) == (404, "not_found")
    await ask("delete_job", made["id"])
    assert await refused(ask("get_named_job", "nightly")) == (404, "not_found")


async def test_many_are_made_in_order_or_not_at_all(ask: Ask) -> None:
    specs = [JOB | {"name": f"n{i}"} for i in range(3)]
    made = await ask("create_jobs", iter(specs), idempotency_key="k")
    assert [job["name"] for job in made["items"]] == ["n0", "n1", "n2"]
    again = await ask("create_jobs", specs, idempotency_key="k")
    assert [job["id"] for job in again["items"]] == [job["id"] for job in made["items"]]
    assert (await refused(ask("create_jobs", [JOB | {"name": "n3"}, JOB | {"name": "n0"}])))[1] == "name_taken"
    assert len(await ask("list_jobs")) == 3


async def test_versions_are_read_over_all_pages(ask: Ask) -> None:
    job = await ask("create_job", JOB)
    for priority in (1, 2):
        await ask("update_job", job["id"], {"priority": priority})
    found = await ask("job_versions", job["id"], limit=1)
    assert [(v["version"], v["spec"]["priority"]) for v in found] == [(3, 2), (2, 1), (1, 500)]


@pytest.mark.parametrize("action", ["pause_job", "resume_job", "cancel_job", "delete_job"])
async def test_actions_heed_the_version(ask: Ask, action: str) -> None:
    job = await ask("create_job", JOB)
    assert (await refused(ask(action, job["id"], if_match=2)))[0] == 412
    assert (await ask("get_job", job["id"]))["state"] == "active"
    await ask(action, job["id"], if_match=1)


async def test_dead_letters_by_filter_and_at_a_rate(ask: Ask, scene: Scene) -> None:
    worker = str(uuid.uuid4())
    job = await ask("create_job", JOB | {"retry": {"max_attempts": 1}})
    for error in ("OSError", "OSError", "ValueError"):
        await ask("run_job", job["id"])
        [key] = await scene.taken(worker)
        await scene.end(worker, end_of(key, "failed", error=error))
    answer = await ask("redrive_dead", filter={"job": job["id"], "error_class": "OSError"}, rate="1/h")
    assert (len(answer["items"]), answer["remaining"]) == (2, 0)
    states = [(await ask("get_run", run["id"]))["state"] for run in answer["items"]]
    assert states == ["ready", "staged"]
    assert await ask("discard_dead", filter={}) == {"discarded": 1, "remaining": 0}
    assert await ask("list_dead") == []
