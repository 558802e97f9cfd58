"""The smuggling corpus behind real proxies: `make test-proxies` installs them; without them these tests are skipped.

All callers share the proxy's connections to the server. After each case, ordinary callers send requests through the
same proxy: each must get its own answer, and the server must have seen its request unchanged.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests import PATIENCE
from tests.node.http_corpus import (
    CORPUS,
    Case,
    TaggedHandler,
    check_answers,
    check_proxied_answers,
    message,
    post,
    talk,
)
from tests.node.http_proxies import KINDS, ProxyKind, running
from tests.node.http_wire import MemoryWire
from tocsin.node.server import protocol
from tocsin.node.server.protocol import HttpServer

# Headers that a proxy adds to or removes from a request.
_OF_PROXIES = {"connection", "x-forwarded-for", "content-length", "transfer-encoding", "x-front"}


@pytest.fixture
async def handler() -> TaggedHandler:
    return TaggedHandler()


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
async def proxy(
    request: pytest.FixtureRequest, handler: TaggedHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[int]:
    monkeypatch.setattr(protocol, "_LINGER_SECONDS", 0.1)
    kind: ProxyKind = request.param
    if kind.path is None:
        pytest.skip(f"{kind.program} is not installed: `make test-proxies` does")
    server = HttpServer(MemoryWire(handler)._respond)
    port = await server.start("127.0.0.1", 0)
    async with running(kind, port, tmp_path) as front:
        yield front
    await server.stop(grace=0)


async def test_no_case_reaches_another_caller(proxy: int, handler: TaggedHandler) -> None:
    answered = 0
    for case in CORPUS:
        answers = await asyncio.wait_for(talk(proxy, case), PATIENCE)
        check_proxied_answers(case, answers)
        answered += len(answers)
        for number in range(2):
            await check_bystander(proxy, f"after-{case.name}-{number}")
        handler.check(behind_proxy=True)
    lines = {id(request._line) for request in handler.handled}
    assert answered > len(CORPUS) and len(handler.handled) > 2 * len(CORPUS)
    assert len(lines) < len(handler.handled) / 2, "the proxy must share its connections, or the test shows nothing"


async def test_no_case_reaches_a_concurrent_caller(proxy: int, handler: TaggedHandler) -> None:
    async def attack(case: Case) -> None:
        check_proxied_answers(case, await asyncio.wait_for(talk(proxy, case), PATIENCE))

    async def ask(caller: int) -> None:
        for number in range(20):
            await check_bystander(proxy, f"caller-{caller}-{number}")

    await asyncio.gather(*(ask(caller) for caller in range(4)), *(attack(case) for case in CORPUS))
    handler.check(behind_proxy=True)


async def check_bystander(port: int, name: str) -> None:
    """Send two requests as an ordinary caller, and compare what the server saw with what was sent."""
    data = post(0, b"accept: text/plain", b"content-length: 4", body=b"body")
    data += message(1, b"accept: text/html", b"connection: close")
    case = Case(name, (200, 200), data)
    answers = await asyncio.wait_for(talk(port, case), PATIENCE)
    check_answers(case, answers)
    assert [answer.status for answer in answers] == [200, 200], (name, answers)
    for number, (answer, accept, body) in enumerate(
        zip(answers, ("text/plain", "text/html"), ("body", ""), strict=False)
    ):
        seen = json.loads(answer.body)
        own = {name: value for name, value in seen["headers"].items() if name not in _OF_PROXIES}
        assert own == {"host": "localhost", "x-tag": case.tag(number), "accept": accept} and seen["body"] == body
        assert seen["headers"]["x-forwarded-for"] == "127.0.0.1"
