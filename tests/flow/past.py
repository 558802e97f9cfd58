"""Past days with audit records, for tests of archiving and tampering."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import duckdb

from tests.flow.kit import Scene
from tocsin.flow import seal, shelve
from tocsin.flow.shared import shelf
from tocsin.model.audit import Anchor, anchors_folder, write_anchor
from tocsin.store.parquet import Parquet

Document = dict[str, Any]
DAY = date(2026, 3, 10)
DAYS = [DAY + timedelta(days=n) for n in range(3)]
A_DAY = 4  # records
LAST_COLD = 2 * A_DAY  # the third day stays in the database
_SAY = (
    "insert into audit (tenant_id, at, actor, key_id, action, target, detail, before, after, address, request_id)"
    " values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
)
_ODD = ['said "no",\n\\N\r\n', "\\N", "", "é, =1+1"]


class Past:
    """Past days with records, sealed and anchored as servers would have done."""

    def __init__(self, scene: Scene, parquet: Parquet) -> None:
        self.scene, self.parquet = scene, parquet
        self.tenant_id = 0

    async def live(self, day: date, tenant_id: int | None = None) -> None:
        tenant_id = tenant_id or self.tenant_id
        for number in range(A_DAY):
            at = datetime.combine(day, time(number, 30), UTC) + timedelta(microseconds=123_456)
            odd = _ODD[number % len(_ODD)]
            detail = None if number % 2 else f'{{"version": {number}, "é": "\\u0007"}}'
            key = "019a0000-0000-7000-8000-000000000001" if number % 3 else None
            after = None if number == 2 else hashlib.sha256(odd.encode()).digest()
            said = (f"key:{number % 2}", key, "job.edit" if number else "job.create", f"job:{odd}", detail, None, after)
            await self.scene.sql.execute(_SAY, tenant_id, at, *said, None if number else "192.0.2.7", odd or None)
        await seal.seal(self.scene.db)
        await self.anchor(datetime.combine(day, time(23, 50), UTC), tenant_id)

    async def anchor(self, at: datetime, tenant_id: int | None = None) -> None:
        tenant_id = tenant_id or self.tenant_id
        head = await self.scene.row("select seq, hash from audit_heads where tenant_id = $1", tenant_id)
        said = write_anchor(Anchor(tenant=tenant_id, seq=head["seq"], hash=head["hash"].hex(), at=at))
        await self.scene.node.objects.put(f"{anchors_folder(tenant_id)}{at:%Y-%m-%d}.ndjson", said)
        await self.scene.sql.execute(
            "update audit_heads set anchored_seq = seq, anchored_at = now() where tenant_id = $1", tenant_id
        )

    async def shelve(self, before: date = DAYS[-1]) -> int:
        node = self.scene.node
        return await shelve.shelve(node.db, node.objects, self.parquet, before)

    async def hot(self) -> list[int]:
        """Return the numbers of the records in the database. Each record has its place in the chain."""
        rows = await self.scene.rows(
            "select c.seq from audit_chain c join audit a on a.id = c.audit_id where c.tenant_id = $1 order by c.seq",
            self.tenant_id,
        )
        assert len(rows) == await self.scene.value("select count(*) from audit where tenant_id = $1", self.tenant_id)
        return [row["seq"] for row in rows]

    async def every(self, **query: Any) -> list[Document]:
        """Return the items of all pages of a list."""
        items: list[Document] = []
        cursor: dict[str, str] = {}
        for _ in range(100):
            page = await self.scene.api.get("/v1/audit", params=query | cursor)
            items += page["items"]
            if page["next_cursor"] is None:
                return items
            cursor = {"cursor": page["next_cursor"]}
        raise AssertionError("the pages have no end")

    async def proofs(self) -> list[Document]:
        """Verify the whole chain, piece by piece."""
        pieces: list[Document] = []
        cursor: dict[str, str] = {}
        for _ in range(100):
            pieces.append(await self.scene.api.get("/v1/audit/verify", params=cursor))
            if pieces[-1]["next_cursor"] is None:
                return pieces
            cursor = {"cursor": pieces[-1]["next_cursor"]}
        raise AssertionError("the pieces have no end")

    async def found(self) -> list[tuple[str, int | None]]:
        """Return the findings of the verification of the whole chain."""
        return [(finding["kind"], finding["seq"]) for piece in await self.proofs() for finding in piece["findings"]]

    async def files(self) -> list[asyncpg.Record]:
        return await self.scene.rows("select * from audit_archives order by tenant_id, first_seq")

    async def rewrite(self, change: Callable[[list[Document]], list[Document]], file: int = 0) -> None:
        """Rewrite a file with other records, and make the catalogue match it."""
        row = (await self.files())[file]
        path = self.scene.node.objects.file(row["object"])
        assert path is not None
        write_file(path, change(read_file(path)))
        data = path.read_bytes()
        await self.scene.sql.execute(
            "update audit_archives set bytes = $3, checksum = $4 where tenant_id = $1 and first_seq = $2",
            *(row["tenant_id"], row["first_seq"], len(data), hashlib.sha256(data).digest()),
        )
        await self.scene.sql.execute(
            "update audit_archives set previous = $3 where tenant_id = $1 and first_seq = $2 + 1",
            *(row["tenant_id"], row["last_seq"], hashlib.sha256(data).digest()),
        )


COLUMNS = list(shelf.COLUMNS)


def read_file(path: Path) -> list[Document]:
    rows = duckdb.sql(f"select * from read_parquet('{path}')").fetchall()
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def write_file(path: Path, records: list[Document]) -> None:
    types = ", ".join(f'"{name}" {kind}' for name, kind in shelf.COLUMNS.items())
    with duckdb.connect() as db:
        db.execute(f"create table records ({types})")
        if records:
            marks = ", ".join("?" * len(COLUMNS))
            db.executemany(f"insert into records values ({marks})", [list(record.values()) for record in records])
        db.execute(f"copy records to '{path}' (format parquet)")
