"""Both clients against a real HTTP server: the same script must give the same story."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Callable
from typing import Any

import pytest
from scripted import Reply, Script, problem

from tocsin.client import ApiError, AsyncClient, Client, Retries, Unreachable
from tocsin.client.facade import Calls, Endpoint, Listing
from tocsin.errors import SetupError

QUICK = Retries(attempts=3, first_pause=0.001)

Ask = Callable[..., Any]


async def ask_sync(url: str, method: str, *args: Any, tenant: str | None = None, **kwargs: Any) -> Any:
    with Client(url, "key", tenant=tenant, retries=QUICK) as client:
        answer = getattr(client, method)(*args, **kwargs)
        return list(answer) if inspect.isgenerator(answer) else answer


async def ask_async(url: str, method: str, *args: Any, tenant: str | None = None, **kwargs: Any) -> Any:
    async with AsyncClient(url, "key", tenant=tenant, retries=QUICK) as client:
        answer = getattr(client, method)(*args, **kwargs)
        return [item async for item in answer] if inspect.isasyncgen(answer) else await answer


@pytest.fixture(params=[ask_sync, ask_async])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param  # type: ignore[no-any-return]


async def test_a_job_is_created(script: Script, ask: Ask) -> None:
    script.on("POST", "/v1/jobs", Reply(201, {"id": "j1"}))
    assert await ask(script.url, "create_job", {"name": "a"}, tenant="blue") == {"id": "j1"}
    (asked,) = script.asked
    assert asked.body == {"name": "a"}
    assert asked.headers["authorization"] == "Bearer key"
    assert asked.headers["tocsin-tenant"] == "blue"
    assert asked.headers["user-agent"].startswith("tocsin-python/")


async def test_a_write_is_repeated_under_one_key(script: Script, ask: Ask) -> None:
    script.on("POST", "/v1/jobs/j1/runs", Reply(hang_up=True), problem(503, "unavailable"), Reply(202, {"id": "r1"}))
    assert await ask(script.url, "run_job", "j1", {"n": 1}) == {"id": "r1"}
    assert len(script.asked) == 3
    assert len({asked.headers["idempotency-key"] for asked in script.asked}) == 1
    assert all(asked.body == {"args": {"n": 1}} for asked in script.asked)


async def test_retry_after_is_heard(script: Script, ask: Ask) -> None:
    script.on("GET", "/v1/jobs/j1", problem(429, "rate", headers={"Retry-After": "0"}), {"id": "j1"})
    assert await ask(script.url, "get_job", "j1") == {"id": "j1"}
    assert len(script.asked) == 2


async def test_a_refusal_is_a_typed_error(script: Script, ask: Ask) -> None:
    wrong = [{"path": "name", "code": "invalid", "message": "too long"}]
    script.on("POST", "/v1/jobs", problem(422, "invalid_input", "name: too long", errors=wrong))
    with pytest.raises(ApiError) as caught:
        await ask(script.url, "create_job", {"name": "a" * 200})
    assert (caught.value.status, caught.value.code, caught.value.errors) == (422, "invalid_input", wrong)
    assert len(script.asked) == 1


async def test_a_list_runs_over_all_its_pages(script: Script, ask: Ask) -> None:
    pages = [{"items": [{"id": "3"}, {"id": "2"}], "next_cursor": "c"}, {"items": [{"id": "1"}], "next_cursor": None}]
    script.on("GET", "/v1/jobs", *pages)
    assert [job["id"] for job in await ask(script.url, "list_jobs", state="active", limit=2)] == ["3", "2", "1"]
    assert [asked.query for asked in script.asked] == [
        {"state": "active", "limit": "2"},
        {"state": "active", "limit": "2", "cursor": "c"},
    ]


async def test_nobody_there(ask: Ask) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unreachable, match=url):
            await ask(url, "get_job", "j1")


async def test_a_broken_connection_is_unreachable_in_the_end(script: Script, ask: Ask) -> None:
    script.on("GET", "/v1/jobs/j1", Reply(hang_up=True))
    with pytest.raises(Unreachable):
        await ask(script.url, "get_job", "j1")
    assert len(script.asked) == QUICK.attempts


async def test_without_credentials_it_says_what_to_do(ask: Ask) -> None:
    with pytest.raises(SetupError, match="tocsin up"):
        await ask(None, "get_job", "j1")


@pytest.mark.parametrize("name", [n for n, v in vars(Calls).items() if isinstance(v, Endpoint | Listing)])
def test_each_method_keeps_its_name_and_doc(name: str) -> None:
    with Client("http://x", "k") as client:
        method = getattr(client, name)
    assert method.__name__ == name
    assert method.__doc__
    assert getattr(Client, name).__doc__ == method.__doc__


def test_the_key_is_not_in_what_is_printed(script: Script) -> None:
    from tocsin.client import Credentials

    assert "sesame" not in repr(Credentials("http://x", "sesame"))
