"""Two tenants, of which one has a word in every table and every kind of object, and who looks for it."""

from __future__ import annotations

import base64
import tempfile
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import zstandard

from tests.flow.kit import Scene, WorkerHand, told
from tests.flow.old import DAY, Old
from tocsin.flow import compact, erase, seal, shelve
from tocsin.flow.erase import TABLES
from tocsin.store.db import Row

CANARY = f"canary_{uuid.uuid4().hex}"
BIG = {"rows": ["x" * 1000] * 80, "say": CANARY}
_ZSTD = b"\x28\xb5\x2f\xfd"


class House:
    """A tenant that has something in every table and every kind of object; `word` stands wherever it can write."""

    def __init__(self, scene: Scene, slug: str, word: str, hand: WorkerHand, old: Old) -> None:
        self.scene, self.slug, self.word, self.hand, self.old = scene, slug, word, hand, old
        self.headers = {"tocsin-tenant": slug, "x-request-id": word}
        self.id = 0

    async def put(self, path: str, body: dict[str, Any]) -> Any:
        return await self.scene.api.call("PUT", path, json=body, headers=self.headers)

    async def post(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
        return await self.scene.api.post(path, body or {}, headers=self.headers | headers)

    async def get(self, path: str) -> Any:
        return await self.scene.api.get(path, headers=self.headers)

    async def job(self, **spec: Any) -> dict[str, Any]:
        target = {"kind": "process", "command": ["echo", self.word], "env": {"WORD": self.word}}
        given = {"target": target, "schedule": {"manual": True}, "tags": {"say": self.word}}
        return await self.post("/v1/jobs", given | spec)  # type: ignore[no-any-return]

    async def build(self) -> None:
        """What comes from calls, and from what a worker says."""
        await self.scene.api.post("/v1/tenants", {"slug": self.slug})
        limit = {"quotas": {"log_bytes_per_day": 10**9}}
        self.id = (await self.scene.api.call("PATCH", f"/v1/tenants/{self.slug}", json=limit))["id"]
        await self.scene.sql.execute(
            "insert into audit (tenant_id, at, actor, action, target) values ($1, $2, $3, 'job.create', $3)",
            *(self.id, datetime.combine(DAY, datetime.min.time(), UTC), self.word),
        )
        await self.scene.sql.execute(
            "insert into event_feeds (tenant_id, since, open_until) values ($1, 0, now() + interval '1 day')", self.id
        )
        await self.post("/v1/keys", {"role": "admin", "name": self.word})
        called = {"kind": "python", "function": self.word}
        await self.job(target=called, placement={"require": {"only": self.word}})
        await self.put(f"/v1/secrets/{self.word}", {"value": self.word})
        await self.put(f"/v1/circuits/{self.word}", {"calls": 5})
        await self.put(f"/v1/calendars/{self.word}", {"days": ["2031-01-01"], "mode": "skip"})
        scheduled = {"cron": "0 0 1 1 *", "calendar": self.word, "max_runs": 5}
        first = await self.job(name=self.word, schedule=scheduled, circuit=self.word)
        second = await self.job(schedule={"every": "P1D"}, max_concurrency=1)
        await self.post(f"/v1/jobs/{second['id']}/pause", {"reason": self.word})
        await self.scene.api.call(
            "PATCH", f"/v1/jobs/{first['id']}", json={"tags": {"say": "less"}}, headers=self.headers
        )
        await self.scene.sql.execute(
            "insert into dependencies (tenant_id, parent_id, child_id, wants, parents) values ($1, $2, $3, 's', 1)",
            *(self.id, first["id"], second["id"]),
        )
        await self.scene.sql.execute("insert into unclaimed (tenant_id, job_id) values ($1, $2)", self.id, first["id"])
        await self.scene.sql.execute(
            "insert into ended_joins (tenant_id, job_id, join_key, run_id) values ($1, $2, $2, $2)",
            *(self.id, first["id"]),
        )
        await self.scene.sql.execute("insert into unmapped (tenant_id, run_id) values ($1, $2)", self.id, first["id"])
        await self.scene.sql.execute(
            "insert into cancels (tenant_id, job_id, reason, stop_running, done_to) values ($1, $2, $3, true, $2)",
            *(self.id, first["id"], self.word),
        )
        past = {"from": "2020-01-01T00:00:00Z", "to": "2022-01-01T00:00:00Z", "args": {"say": self.word}}
        filled = await self.post(f"/v1/jobs/{first['id']}/backfill", past)
        await self.scene.sql.execute(
            "insert into backfill_ends values ($1, $2, gen_random_uuid(), now(), 'dead')", self.id, filled["id"]
        )
        by_hand = await self.job(retry={"max_attempts": 1})
        await self.post(
            f"/v1/jobs/{by_hand['id']}/runs", {"args": {"say": self.word}}, **{"idempotency-key": self.word}
        )
        await self.post(f"/v1/jobs/{by_hand['id']}/runs", {"args": BIG | {"say": self.word}})
        await self.post(f"/v1/jobs/{by_hand['id']}/runs", {"args": {"say": self.word}, "sensitive": True})

    async def archived(self) -> None:
        """A run of long ago."""
        job = await self.job()
        older = f"018f{job['id'][4:]}"
        await self.scene.sql.execute("update jobs set id = $2 where id = $1", job["id"], older)
        [run_id] = await self.old.rows({"id": older}, DAY, 1, state="dead")
        await self.scene.sql.execute("update history set error = $2 where run_id = $1", run_id, self.word)

    async def everything(self) -> dict[str, list[str]]:
        """All its rows, table by table."""
        days = [row["name"] for row in await self.scene.rows(erase.SQL["days"])]
        return {
            table: sorted(
                row["row"]
                for row in await self.scene.rows(f"select t::text as row from {table} t where tenant_id = $1", self.id)
            )
            for table in (*TABLES, *days)
        }


class Town:
    """Two tenants that share workers and objects, and one who looks everywhere."""

    def __init__(self, scene: Scene, hand: WorkerHand, old: Old) -> None:
        self.scene, self.hand, self.old = scene, hand, old
        self.acme = House(scene, "acme", CANARY, hand, old)
        self.other = House(scene, "other", f"other_{uuid.uuid4().hex}", hand, old)

    async def build(self) -> None:
        scene, houses = self.scene, (self.acme, self.other)
        await self.old.make_day(DAY)
        for house in houses:
            await house.build()
            await house.archived()
        await seal.seal(scene.db)
        await seal.anchor(
            scene.db, scene.node.objects, scene.node.master_keys, "test", scene.node.anchor_series, every=0.0
        )
        await self.old.archive()
        await shelve.shelve(scene.db, scene.node.objects, self.old.parquet, DAY + timedelta(days=1))
        claimed = await scene.take(100, self.hand.id)
        assert len(claimed) == 6
        # One object that is compacted for each of them; and one that both are in.
        await self.hand.ship(*map(self.chunk, claimed))
        await scene.sql.execute("update log_segments set added_at = now() - interval '2 hours'")
        for house in houses:
            assert await compact.compact(scene.db, scene.node.objects, house.id) == 1
        await self.hand.ship(*(self.chunk(run, 1) for run in claimed))
        await self.hand.report(finished=[self.end(run) for run in claimed])
        for house in houses:
            await house.job(name="live", schedule={"cron": "0 0 1 1 *"})
            [job] = (await house.get("/v1/jobs?q=live"))["items"]
            await house.post(f"/v1/jobs/{job['id']}/runs", {"args": {"say": house.word}})

    def word(self, run: Row) -> str:
        return CANARY if run["tenant_id"] == self.acme.id else self.other.word

    def chunk(self, run: Row, offset: int = 0) -> dict[str, Any]:
        return key_of(run) | {
            "offset": offset,
            "lines": [[time.time(), "stdout", "info", f"{self.word(run)} says {offset}"]],
        }

    def end(self, run: Row) -> dict[str, Any]:
        word = self.word(run)
        return told(key_of(run), "failed", result=BIG | {"say": word}, error={"class": word, "message": word})

    async def erase(self) -> None:
        """All of it, without waiting for what may come late."""
        await self.scene.api.call("DELETE", "/v1/tenants/acme", json={"confirm": "acme"}, expect=202)
        await self.go_on()

    async def go_on(self) -> None:
        for _ in range(3):
            await erase.turn(self.scene.db, self.scene.node.objects, settle_seconds=0.0)

    async def traces(self) -> list[str]:
        """Where the canary is found: in rows of any table, and in objects."""
        tables = await self.scene.rows(
            "select c.relname as name from pg_class c where c.relkind = 'r' and c.relnamespace = 'tocsin'::regnamespace"
        )
        found = []
        for table in tables:
            rows = await self.scene.rows(f"select t::text as row from {table['name']} t")
            found += [table["name"] for row in rows if _tells(row["row"].encode())]
        objects = self.scene.node.objects
        found += [key for key in await objects.keys("") if _in_object(key, await objects.read(key) or b"")]
        return sorted(set(found))


def key_of(run: Row) -> dict[str, Any]:
    """A claimed run as a worker names it."""
    return {"run_id": run["id"], "attempt": run["attempt"], "fence": run["fence"]}


def _tells(data: bytes) -> bool:
    word = CANARY.encode()
    return any(form in data for form in (word, word.hex().encode(), base64.b64encode(word)[:-4]))


def _in_object(key: str, data: bytes) -> bool:
    return any(map(_tells, _opened(key, data)))


def _opened(key: str, data: bytes) -> Iterator[bytes]:
    """An object's bytes; those of each frame in it; and the rows that it has."""
    yield data
    at = data.find(_ZSTD)
    while at >= 0 and key.endswith(".zst"):
        yield zstandard.ZstdDecompressor().decompressobj().decompress(data[at:])
        at = data.find(_ZSTD, at + 1)
    if key.endswith(".parquet"):
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            file.write(data)
            file.flush()
            yield str(duckdb.sql(f"select * from read_parquet('{file.name}')").fetchall()).encode()
