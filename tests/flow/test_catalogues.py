"""Catalogues of files: the cost of retention grows with the due rows, not with the kept rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.conftest import Cluster
from tests.flow.crowd import Crowd
from tests.flow.kit import Scene
from tocsin.flow import retention, shelve

FILES = 20_000
_TENANTS = "insert into tenants (slug) select 't' || n from generate_series(1, $1::int) n"
_ARCHIVES = """
insert into archives (tenant_id, day, object, rows, bytes, checksum, cold_at, expired_at)
select t.id, (now() at time zone 'UTC')::date - $1::int, $2 || n, 1, 1, '', now(), case when $4 then now() end
  from tenants t, generate_series(1, $3::int) n
"""
_AUDIT = """
insert into audit_archives (tenant_id, first_seq, last_seq, last_hash, last_id, day, first_at, last_at, object, bytes,
                            checksum, previous, gone_at)
select t.id, $4::int + n, $4::int + n, '', 0, '2026-01-01', now() - $1::int * interval '1 day',
       now() - $1::int * interval '1 day', $2 || n, 1, '', '', now()
  from tenants t, generate_series(1, $3::int) n
"""


@pytest.fixture
def database_url(cluster: Cluster) -> Iterator[str]:
    """Create a separate database: other tests would count the remains of many rows."""
    name = asyncio.run(cluster.clone())
    yield cluster.url(name)
    asyncio.run(cluster.drop(name))


async def turn(scene: Scene) -> int:
    """Run the archivist's steps for catalogues. Return how many files were removed."""
    await retention.expire(scene.db, 365)
    gone = await retention.remove(scene.db, scene.node.objects)
    return gone + await retention.expire_audit(scene.db, scene.node.objects, 365)


async def test_a_turn_does_not_read_kept_rows(scene: Scene) -> None:
    await scene.sql.execute(_ARCHIVES, 10, "kept", FILES, False)
    await scene.sql.execute(_AUDIT, 10, "kept", FILES, 0)
    await scene.sql.execute("analyze archives, audit_archives")
    crowd = Crowd(scene)
    least = 1_000_000
    for _ in range(3):  # the minimum: autovacuum may read pages, too
        before = await crowd.pages_read()
        assert await turn(scene) == 0
        least = min(least, await crowd.pages_read() - before)
    assert least < 100, "both catalogues together have about a thousand pages"


async def test_every_tenant_gets_its_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves are smaller than the number of due files, and some tenants hold their files."""
    monkeypatch.setattr(retention, "_WAVE", 3)
    monkeypatch.setattr(retention, "_TENANTS", 2)
    await scene.sql.execute(_TENANTS, 6)
    await scene.sql.execute(_ARCHIVES, 400, "old", 5, False)
    await scene.sql.execute(_ARCHIVES, 400, "expired", 5, True)
    await scene.sql.execute(_ARCHIVES, 10, "kept", 2, False)
    await scene.sql.execute(_AUDIT, 400, "old", 5, 0)
    await scene.sql.execute(_AUDIT, 10, "kept", 2, 5)
    await scene.sql.execute("update tenants set legal_hold = true where slug in ('t1', 't4')")
    assert await turn(scene) == 5 * 15
    left = await scene.rows("select t.slug, a.object from archives a join tenants t on t.id = a.tenant_id")
    assert {row["object"][:4] for row in left if row["slug"] not in ("t1", "t4")} == {"kept"}
    assert len(left) == 7 * 2 + 2 * 10
    chains = await scene.rows(
        "select t.slug, count(*) filter (where f.object is null) as gone, count(f.object) as here"
        " from audit_archives f join tenants t on t.id = f.tenant_id group by t.slug"
    )
    free = {(row["gone"], row["here"]) for row in chains if row["slug"] not in ("t1", "t4")}
    assert free == {(1, 2)}, "of what is gone, where the chain begins"
    assert {(row["gone"], row["here"]) for row in chains} - free == {(0, 7)}
    assert await turn(scene) == 0


async def test_jobs_are_looked_through_in_pieces(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_JOBS", 4)
    monkeypatch.setattr(retention, "_WAVE", 2)
    for number in range(11):
        job = await scene.job(name=f"j{number}")
        if number % 2 == 0:
            await scene.sql.execute(
                "update jobs set once = true, state = 'completed', ended_at = now() - interval '50 days' where id = $1",
                job["id"],
            )
    now = await scene.now()
    assert await retention.forget_jobs(scene.db, now, 365) == 6
    assert await scene.value("select count(*) from jobs") == 5


async def test_chains_are_looked_at_in_waves(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelve, "_TENANTS", 1)
    await scene.sql.execute(_TENANTS, 3)
    await scene.sql.execute(
        "insert into audit_heads (tenant_id, seq, hash) select id, 0, '' from tenants on conflict do nothing"
    )
    node = scene.node
    assert await shelve.shelve(node.db, node.objects, node.parquet, (await scene.now()).date()) == 0
