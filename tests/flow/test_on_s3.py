"""Records on an S3 server: what the steps do in a folder they do there."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests import s3 as server
from tests.flow.kit import Scene, WorkerHand
from tests.flow.past import LAST_COLD, Past
from tests.flow.test_compact import check, chunk, clean, held, logged
from tests.flow.test_compact import tenant as tenant
from tests.flow.test_compact import worker as worker
from tocsin.flow import compact
from tocsin.flow.shared.segments import loose_object
from tocsin.model.ids import new_id
from tocsin.settings import Settings


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with server.serving() as endpoint:
        yield endpoint


@pytest.fixture
def settings(tmp_path: Path, database_url: str, s3: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    url = f"{server.use(s3, monkeypatch)}/{tmp_path.name}"  # that server remembers what other tests put
    return Settings.load({}, home=tmp_path, database_url=database_url, objects_url=url)


async def test_logs_are_compacted_found_and_swept(scene: Scene, worker: WorkerHand, tenant: int) -> None:
    objects = scene.node.objects
    wanted = await logged(scene, worker)
    assert await compact.compact(scene.db, objects, tenant) == 10
    await check(scene, wanted)
    assert await clean(scene) == 10
    await scene.sql.execute("update migrations set applied_at = now() - interval '9 days'")
    stray = loose_object(next(iter(wanted)), new_id(await scene.now() - timedelta(hours=2)))
    await objects.put(stray, b"nobody names it")
    assert await compact.sweep(scene.db, objects) == 1
    await check(scene, wanted)
    run = await held(scene, worker)
    await worker.ship(chunk(run, 0, "line of one that is lost"))
    await objects.delete(await scene.value("select object from log_segments where not compacted"))
    page = await scene.api.get("/v1/logs/search", params={"q": "line"})
    assert page["incomplete"] and page["items"]


async def test_the_audit_is_archived_and_proved(past: Past) -> None:
    assert await past.shelve() == 2
    assert min(await past.hot()) == LAST_COLD + 1
    assert await past.found() == []
