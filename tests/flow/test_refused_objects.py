"""Objects that storage always refuses to delete: all objects behind them are deleted all the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.flow.kit import Scene
from tocsin.errors import Unavailable
from tocsin.flow import compact, erase, payloads, retention
from tocsin.node.compactor import Compactor
from tocsin.store.objects import ObjectStore, Refusals


class Refusing(ObjectStore):
    """Object storage that refuses to delete some objects, and counts the attempts."""

    def __init__(self, whole: ObjectStore, word: str = "refused") -> None:
        self.__dict__.update(whole.__dict__)
        self.word, self.refused = word, 0

    async def delete(self, key: str) -> None:
        if self.word in key:
            self.refused += 1
            raise Unavailable("object storage refused a delete", code="objects_unavailable")
        await super().delete(key)


@pytest.fixture
def storage(scene: Scene) -> Refusing:
    return Refusing(scene.node.objects)


async def turns(clean: Any, scene: Scene, storage: Refusing, count: int = 4) -> None:
    for _ in range(count):
        try:
            await clean(scene.db, storage)
        except Unavailable:
            continue


async def count(scene: Scene, table: str, like: str) -> int:
    return int(await scene.value(f"select count(*) from {table} where object like $1", like))


async def fill(scene: Scene, table: str) -> None:
    """Create two batches of refused objects, and two other objects behind them."""
    tenant = "" if table == "log_garbage" else "(select id from tenants where slug = 'default'), "
    columns = "object, due_at" if table == "log_garbage" else "tenant_id, object, look_at"
    for name, first, last, minutes in (("refused", 1, 200, 60), ("plain", 1, 2, 5)):
        await scene.sql.execute(
            f"insert into {table} ({columns})"
            f" select {tenant} 'nowhere/{name}-' || i, now() - {minutes} * interval '1 min'"
            f"  from generate_series({first}, {last}) as i"
        )


@pytest.mark.parametrize(("table", "clean"), [("log_garbage", compact.clean), ("payloads", payloads.clean)])
async def test_a_batch_that_is_refused_hides_nothing_behind_it(
    scene: Scene, storage: Refusing, table: str, clean: Any
) -> None:
    await fill(scene, table)
    await turns(clean, scene, storage)
    assert await count(scene, table, "%plain%") == 0
    assert await count(scene, table, "%refused%") == 200, "they are not forgotten"
    assert storage.refused == 200, "each was tried once, and is tried again later"


async def test_one_object_that_is_refused_keeps_no_step_of_the_compactor_back(scene: Scene, storage: Refusing) -> None:
    for table in ("log_garbage", "payloads"):
        await fill(scene, table)
    compactor = Compactor(scene.db, storage)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await compactor.run_once()
    await compactor.run_once()
    assert await count(scene, "payloads", "%plain%") == await count(scene, "log_garbage", "%plain%") == 0


async def test_a_tenant_whose_files_are_refused_keeps_no_others(scene: Scene, storage: Refusing) -> None:
    for slug in ("first", "second"):
        await scene.api.post("/v1/tenants", {"slug": slug})
    for slug, name in (("default", "refused"), ("first", "plain"), ("second", "plain")):
        await scene.sql.execute(
            "insert into archives (tenant_id, day, object, rows, bytes, checksum, cold_at, expired_at)"
            " select t.id, '2020-01-01'::date + i, format('nowhere/%s/%s%s', t.id, $2::text, i), 1, 1, '', now(), now()"
            " from tenants t, generate_series(1, 3) as i where t.slug = $1",
            slug,
            name,
        )
    with pytest.raises(Unavailable):
        await retention.remove(scene.db, storage)
    assert await count(scene, "archives", "%plain%") == 0
    assert await count(scene, "archives", "%refused%") == 3
    assert storage.refused == 1, "of a tenant that was refused one, the others wait for the next turn"


async def test_storage_that_is_away_ends_a_turn_of_retention(scene: Scene, storage: Refusing) -> None:
    await scene.sql.execute(
        "insert into tenants (slug) select 'away-' || i from generate_series(1, $1::int) as i", 2 * Refusals.MOST
    )
    await scene.sql.execute(
        "insert into archives (tenant_id, day, object, rows, bytes, checksum, cold_at, expired_at)"
        " select t.id, '2020-01-01', 'nowhere/refused-' || t.id, 1, 1, '', now(), now() from tenants t"
    )
    with pytest.raises(Unavailable):
        await retention.remove(scene.db, storage)
    assert storage.refused == Refusals.MOST


async def test_an_erasure_that_fails_keeps_no_other_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for slug in ("first", "second"):
        ids.append((await scene.api.post("/v1/tenants", {"slug": slug}))["id"])
        await scene.api.call("DELETE", f"/v1/tenants/{slug}", json={"confirm": slug}, expect=202)
    take = erase._Erasure._take_objects

    async def broken(self: erase._Erasure) -> int:
        if self._tenant_id == ids[0]:
            raise ValueError("a fault of ours")
        return await take(self)

    monkeypatch.setattr(erase._Erasure, "_take_objects", broken)
    monkeypatch.setattr(erase, "_TENANTS", 1)
    for _ in range(8):
        try:
            await erase.turn(scene.db, scene.node.objects, settle_seconds=0.0)
        except ValueError:
            continue
    states = dict(await scene.sql.fetch("select slug, state from erasures"))
    assert states == {"first": "erasing", "second": "erased"}
