"""A key is revoked on one of two real servers: on both its streams end and its calls are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import PATIENCE
from tests.conftest import Cluster

from .cluster import Server, Site, until


@pytest.fixture
def site(cluster: Cluster, database_url: str, tmp_path: Path) -> Any:
    with Site(tmp_path, database_url, cluster.keys) as site:
        yield site


class Caller:
    """Who calls one server with a key all the time, and follows its events."""

    def __init__(self, server: Server, key: str) -> None:
        self.http = httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)
        self.open = asyncio.Event()

    async def listen(self) -> str:
        """Until the stream is ended; all that came."""
        heard = ""
        async with self.http.stream("GET", "/v1/events") as stream:
            async for line in stream.aiter_lines():
                heard += line + "\n"
                if line.startswith("event: open"):
                    self.open.set()
        return heard

    async def call(self) -> None:
        """Until it is refused; each call finds the key remembered from those before."""

        async def refused() -> bool:
            reply = await self.http.get("/v1/jobs")
            assert reply.status_code in (200, 401), reply.text
            return reply.status_code == 401

        await until("the key is refused", refused, 60, every=0.02)


async def test_a_revoked_key_opens_nothing_on_any_server(site: Site) -> None:
    servers = await asyncio.gather(*(site.server(f"s{n}") for n in range(2)))
    async with site.client(servers[0]) as admin:
        made = (await admin.post("/v1/keys", json={"role": "viewer"})).json()
        callers = [Caller(server, made["key"]) for server in servers]
        listening = [asyncio.create_task(caller.listen()) for caller in callers]
        calling = [asyncio.create_task(caller.call()) for caller in callers]
        await asyncio.gather(*(asyncio.wait_for(caller.open.wait(), PATIENCE) for caller in callers))
        assert not any(task.done() for task in (*listening, *calling))
        assert (await admin.delete(f"/v1/keys/{made['id']}")).status_code == 204
        # `python -m bench access` measures how soon.
        await asyncio.wait_for(asyncio.gather(*listening, *calling), PATIENCE)
        await asyncio.gather(*(caller.http.aclose() for caller in callers))
