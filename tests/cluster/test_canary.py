"""A canary secret, told by jobs in every way they can, is found in no table, log, object, metric or answer; nor in the
archive, when all that it left is moved there."""

from __future__ import annotations

import asyncio
import base64
import json
import mmap
import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import asyncpg
import duckdb
import httpx
import zstandard

from tests.conftest import Cluster

from .cluster import ROOT, Server, Site, until
from .test_records import Stage, long_ago

ENDED = ("succeeded", "dead", "cancelled", "expired")
SECRET = f'can"ary/sécret+{uuid.uuid4().hex}'
SENSITIVE = f"canary-argument {uuid.uuid4().hex}"


def forms(value: str) -> Iterator[bytes]:
    """What must not be found; of base64 what any neighbours leave as it is."""
    data = value.encode()
    yield data
    yield data.hex().encode()
    yield quote(value, safe="").encode()
    yield json.dumps(value)[1:-1].encode()
    for before in range(3):
        whole = base64.b64encode(b"x" * before + data + b"yz")
        yield whole[4:-4]
    yield data[-16:]


CANARIES = {form for value in (SECRET, SENSITIVE) for form in forms(value)}


def tells(text: bytes) -> list[bytes]:
    return [form for form in CANARIES if form in text]


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """An endpoint that says what it was asked: at once, with 500, or as the end that it tells by itself later."""
    calls = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = (line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
        headers = {name.lower(): value for name, value in lines}
        body = head + await reader.readexactly(int(headers.get("content-length", 0)))
        later = "tocsin-callback" in headers
        status = b"202 Later" if later else b"500 No"
        writer.write(b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()
        writer.close()
        if later:
            calls.add(asyncio.create_task(tell(headers, {"asked": body.decode()})))

    async def tell(headers: dict[str, str], result: Any) -> None:
        key = {"Authorization": f"Bearer {headers['tocsin-run-token']}"}
        async with httpx.AsyncClient() as client:
            reply = await client.post(headers["tocsin-callback"], json={"result": result}, headers=key)
            assert reply.is_success, reply.text

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


class Hunt:
    """One server and one worker, and a look into everything they leave."""

    def __init__(self, site: Site, api: httpx.AsyncClient, cluster: Cluster) -> None:
        self.site, self.api, self.cluster = site, api, cluster

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        reply = await self.api.post(path, json=body)
        assert reply.is_success, reply.text
        return reply.json()

    async def run(self, target: dict[str, Any], attempts: int, **args: Any) -> str:
        """A run with the secret and sensitive arguments."""
        spec = {"target": target, "schedule": {"manual": True}, "secrets": {"TOKEN": "token"}, "sensitive": True}
        job = await self.post("/v1/jobs", spec | {"retry": {"max_attempts": attempts, "backoff": "immediate"}})
        return str((await self.post(f"/v1/jobs/{job['id']}/runs", {"args": args}))["id"])

    async def passed_on(self) -> list[dict[str, Any]]:
        """The runs of a workflow in which one is told the secret, and the next what that one makes of it."""
        jobs = {
            "first": {"target": {"kind": "python", "function": "tell"}, "secrets": {"TOKEN": "token"}},
            "second": {"target": {"kind": "python", "function": "pass_on"}, "depends_on": ["first"]},
        }
        workflow = await self.post("/v1/workflows", {"name": "whispers", "jobs": jobs, "schedule": {"manual": True}})
        begun = await self.post(f"/v1/workflows/{workflow['id']}/runs", {})
        nodes = (await self.ended(begun["id"], "workflow-runs"))["nodes"]
        return [await self.ended(node["run_id"]) for node in nodes]

    async def ended(self, run_id: str, what: str = "runs") -> dict[str, Any]:
        async def look() -> Any:
            run = (await self.api.get(f"/v1/{what}/{run_id}")).json()
            return run if run["state"] in ENDED else None

        return await until(f"{run_id} ends", look, 60)  # type: ignore[no-any-return]

    async def told(self, run_id: str) -> bytes:
        """All that the API tells of a run."""
        paths = ("", "/attempts", "/logs?limit=500")
        return b"".join([(await self.api.get(f"/v1/runs/{run_id}{path}")).content for path in paths])

    @asynccontextmanager
    async def database(self) -> AsyncIterator[asyncpg.Connection]:
        """A superuser's connection."""
        database = urlsplit(self.site.settings["DATABASE_URL"]).path.lstrip("/")
        connection = await asyncpg.connect(self.cluster.as_superuser(database))
        try:
            yield connection
        finally:
            await connection.close()

    async def archived(self, server: Server) -> None:
        """Let all that ended have ended long ago, and wait until it has left the database."""
        async with self.database() as sql:
            await sql.execute("set search_path = tocsin")
            place = Stage(self.site, server, sql)
            rows = await sql.fetchval("select count(*) from history")
            await long_ago(place, 100, "default")
            server.kill()
            await server.start()  # its archivist begins with it
            await place.until_value(1, "select count(*) from archived_days where gone_at is not null")
            assert await sql.fetchval("select sum(rows) from archives") == rows > 0

            async def published() -> bool:
                return bool(place.objects("version-hint.text"))

            await until("it is published", published, 60)

    async def rows(self) -> bytes:
        """Every row of every table."""
        async with self.database() as connection:
            tables = await connection.fetch(
                "select c.oid::regclass::text as name from pg_class c"
                " where c.relkind = 'r' and c.relnamespace = 'tocsin'::regnamespace"
            )
            assert {"tocsin.runs", "tocsin.secrets", "tocsin.data_keys"} <= {row["name"] for row in tables}
            read = [await connection.fetch(f"select t::text as row from {row['name']} t") for row in tables]
            return "\n".join(row["row"] for rows in read for row in rows).encode()

    def objects(self) -> Iterator[tuple[Path, bytes]]:
        for path in Path(self.site.home, "objects").rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                yield path, data
                if path.suffix == ".parquet":
                    yield path, str(duckdb.sql(f"select * from read_parquet('{path}')").fetchall()).encode()
                if data.startswith(b"\x28\xb5\x2f\xfd"):
                    yield path, zstandard.ZstdDecompressor().decompressobj().decompress(data)

    def database_files(self) -> Iterator[tuple[Path, bytes]]:
        """PostgreSQL's own: tables with what was deleted from them, the write-ahead log, what it logged."""
        for folder in ("data", "logs"):
            for place, _, names in os.walk(self.cluster.home / folder):
                for path in (Path(place, name) for name in names):
                    if path.is_file() and path.stat().st_size:
                        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                            if any(data.find(value.encode()) >= 0 for value in (SECRET, SENSITIVE)):
                                yield path, bytes(data)


async def test_no_canary_is_found_anywhere(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    key = base64.b64encode(os.urandom(32)).decode()
    settings = {"master_key": key, "log_level": "debug", "hot_days": 2, "iceberg": True}
    with Site(tmp_path, database_url, cluster.keys, lease=20, heartbeat=2, **settings) as site:
        server = await site.server("server")
        worker = await site.worker("worker", server, module="tests.cluster.blabbers:app", start=False)
        worker.env |= {"TOCSIN_HTTP_PRIVATE": "1", "TOCSIN_LOG_LEVEL": "debug"}
        await worker.start()
        async with site.client(server) as api, echo() as url:
            hunt = Hunt(site, api, cluster)
            assert (await api.put("/v1/secrets/token", json={"value": SECRET})).status_code == 201
            program = {"kind": "process", "command": [sys.executable, str(ROOT / "tests/cluster/blabbers.py")]}
            calls = {"kind": "http", "url": url, "headers": {"X-Token": "{secrets.TOKEN}"}}
            later = calls | {"callback": True, "body": {"about": "{secrets.TOKEN}"}}
            functions = [{"kind": "python", "function": name} for name in ("tell", "fail", "keep")]
            tries = [(program, 1), *zip(functions, (1, 1, 2), strict=True), (calls, 1), (later, 1)]
            run_ids = [await hunt.run(target, attempts, iban=SENSITIVE) for target, attempts in tries]
            runs = [await hunt.ended(run_id) for run_id in run_ids]
            assert [run["error"]["class"] if run["error"] else run["state"] for run in runs] == [
                *("exit", "succeeded", "RuntimeError", "succeeded", "status_5xx", "succeeded")
            ]
            assert runs[3]["result"] == "as it was"
            first, second = await hunt.passed_on()
            assert second["result"] == {"first": first["result"]} and "***" in str(second["result"])
            run_ids += [first["id"], second["id"]]
            answers = {run_id: await hunt.told(run_id) for run_id in run_ids}
            telling = set(run_ids) - {run_ids[3]}
            assert all(b"***" in answers[run_id] for run_id in telling), "each of them tried to tell"
            answers["dead"] = (await api.get("/v1/dead-letters")).content
            answers["secrets"] = (await api.get("/v1/secrets")).content
            answers["jobs"] = (await api.get("/v1/jobs")).content
            answers["workflows"] = (await api.get("/v1/workflow-runs")).content
            answers["metrics"] = (await api.get("/metrics")).content
            answers["rows"] = await hunt.rows()
        await hunt.archived(server)
        answers["archived"] = await hunt.rows()
        answers |= {process.name: process.log.read_bytes() for process in (server, worker)}
        found = {name: tells(text) for name, text in answers.items()}
        objects = list(hunt.objects())
        archived = b"".join(data for path, data in objects if path.suffix == ".parquet")
        assert all(run_id[-12:].encode() in archived for run_id in run_ids) and b"***" in archived, "they are all there"
        found |= {str(path): tells(data) for path, data in objects}
        assert not {name: forms for name, forms in found.items() if forms}
        assert [path for path, _ in hunt.database_files()] == []
