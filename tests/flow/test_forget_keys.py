"""Idempotency records are deleted after a day, in batches that do not depend on each other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.flow.kit import Scene
from tocsin.flow import events, sweep
from tocsin.node.reaper import Caretaker


async def remember(scene: Scene, count: int, age: str) -> None:
    await scene.sql.execute(
        "insert into idempotency (tenant_id, key, digest, status, ids, created_at)"
        " select t.id, $2 || n, '', 200, '{}', now() - $2::interval"
        " from generate_series(1, $1) n, tenants t where t.slug = 'default'",
        count,
        age,
    )


async def left(scene: Scene) -> int:
    return await scene.value("select count(*) from idempotency")  # type: ignore[no-any-return]


async def test_old_records_are_deleted_in_bounded_batches_and_young_ones_stay(scene: Scene) -> None:
    before = await left(scene)
    await remember(scene, 25, "2 days")
    await remember(scene, 3, "1 hour")
    assert await sweep.forget_keys(scene.db, batch=10, most=20) == 20
    assert await sweep.forget_keys(scene.db, batch=10, most=20) == 5
    assert await left(scene) == before + 3


async def test_deleted_batches_stay_deleted_when_the_next_batch_fails(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await left(scene)
    await remember(scene, 25, "2 days")
    fetchval, batches = scene.db.fetchval, 0

    async def failing(*args: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 2:
            raise OSError("the connection is gone")
        return await fetchval(*args)

    monkeypatch.setattr(scene.db, "fetchval", failing)
    with pytest.raises(OSError):
        await sweep.forget_keys(scene.db, batch=10)
    assert await left(scene) == before + 15


async def test_a_turn_that_fails_does_not_keep_the_next_from_other_work(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(_db: Any) -> None:
        raise OSError("the connection is gone")

    monkeypatch.setattr(events, "tidy", failing)
    [caretaker] = [loop for loop in scene.node._loops if isinstance(loop, Caretaker)]
    caretaker._turn = 0
    before = await left(scene)
    await remember(scene, 5, "2 days")
    with pytest.raises(OSError):
        await caretaker.run_once()
    await caretaker.run_once()
    assert await left(scene) == before
