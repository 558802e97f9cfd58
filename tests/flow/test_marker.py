"""marker: servers of one database have one object storage, or do not start; without any they start."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import s3
from tests.flow.kit import Scene
from tocsin.errors import SetupError, Unavailable
from tocsin.flow import marker
from tocsin.node import assemble
from tocsin.node.assemble import Node
from tocsin.settings import Settings
from tocsin.store.objects import ObjectStore


@pytest.fixture(params=["folder", "s3"])
def places(
    request: pytest.FixtureRequest, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Settings, Settings]]:
    """Settings of two servers that have the same database, and each an object storage of its own."""
    if request.param == "folder":
        yield settings, replace(settings, home=tmp_path / "other")
    else:
        with s3.serving() as endpoint:
            url = f"{s3.use(endpoint, monkeypatch)}/{tmp_path.name}"  # that server remembers what other tests put
            yield replace(settings, objects_url=f"{url}/one"), replace(settings, objects_url=f"{url}/other")


async def start(settings: Settings) -> Node:
    """Start a server, and end it."""
    node = Node(settings)
    try:
        await node.start(loops=False)
    finally:
        await node.stop()
    return node


async def lost(settings: Settings) -> str:
    """Start a server that refuses; answers the marker that it misses."""
    with pytest.raises(SetupError, match="is not that of the other servers") as refused:
        await start(settings)
    message = str(refused.value)
    known = message.partition("TOCSIN_ADOPT_OBJECTS=")[2].split()[0]
    assert Node(settings).objects.address(f"marker/{known}") in message
    return known


async def test_the_first_server_puts_a_marker_and_others_with_its_storage_start(
    places: tuple[Settings, Settings],
) -> None:
    first = await start(places[0])
    [key] = await first.objects.keys("marker/")
    await start(places[0])
    assert await first.objects.keys("marker/") == [key]


async def test_a_server_with_another_storage_refuses_to_start(places: tuple[Settings, Settings]) -> None:
    first, other = places
    node = await start(first)
    known = await lost(other)
    assert await node.objects.keys("marker/") == [f"marker/{known}"]
    assert await Node(other).objects.keys("marker/") == [], "who is refused leaves nothing"
    await start(first)


async def test_a_copy_of_the_storage_is_as_good(settings: Settings, tmp_path: Path) -> None:
    await start(settings)
    shutil.copytree(settings.home / "objects", tmp_path / "moved" / "objects")
    await start(replace(settings, home=tmp_path / "moved"))


async def test_another_storage_comes_in_the_place_of_one_that_is_given_up_by_name(
    places: tuple[Settings, Settings],
) -> None:
    first, other = places
    await start(first)
    known = await lost(other)
    assert await lost(replace(other, adopt_objects="00000000-0000-0000-0000-000000000000")) == known
    adopting = replace(other, adopt_objects=known)
    await start(adopting)
    await start(other)

    again = await lost(first)
    assert again != known
    assert await lost(replace(first, adopt_objects=known)) == again, "a name that was left behind gives nothing else up"
    await start(adopting)


class Meeting(ObjectStore):
    """A storage in which two servers have both put their markers before either goes on."""

    both: asyncio.Barrier

    async def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        await super().put(key, data, durable=durable)
        await self.both.wait()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("given_up", [False, True])
async def test_two_that_start_first_at_once_agree_or_one_refuses(
    scene: Scene, tmp_path: Path, same: bool, given_up: bool
) -> None:
    lost = await scene.value("select objects_id::text from cluster") if given_up else ""
    if not given_up:
        await scene.sql.execute("update cluster set objects_id = null")
    stores = [Meeting("", tmp_path / "a"), Meeting("", tmp_path / ("a" if same else "b"))]
    both = asyncio.Barrier(2)
    for store in stores:
        store.both = both
    answers = await asyncio.gather(*(marker.compare(scene.db, store, lost) for store in stores), return_exceptions=True)
    assert [type(answer) for answer in answers].count(SetupError) == (0 if same else 1)
    known = await scene.value("select objects_id::text from cluster")
    assert known and known != lost
    for store, answer in zip(stores, answers, strict=True):
        assert await store.keys("marker/") == ([f"marker/{known}"] if answer is None else [])


async def test_what_was_put_before_a_crash_is_in_nobodys_way(scene: Scene) -> None:
    await scene.sql.execute("update cluster set objects_id = null")
    await marker.compare(scene.db, scene.node.objects, "")
    assert await scene.value("select objects_id is not null from cluster")
    await marker.compare(scene.db, scene.node.objects, "")


class Refusing(ObjectStore):
    """A storage that cannot be reached."""

    async def read(self, key: str) -> bytes | None:
        raise Unavailable("object storage refused a read: nobody there", code="objects_unavailable")

    async def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        raise Unavailable("object storage refused a write: nobody there", code="objects_unavailable")


class Silent(ObjectStore):
    """A storage that never answers."""

    async def read(self, key: str) -> bytes | None:
        await asyncio.Event().wait()
        return None

    async def put(self, key: str, data: bytes, *, durable: bool = False) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("kind", "why"), [(Refusing, "nobody there"), (Silent, "no answer within")])
async def test_a_server_starts_without_its_storage_and_says_so(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, known: bool, kind: type[ObjectStore], why: str
) -> None:
    if known:
        await start(settings)
    told: list[dict[str, Any]] = []

    def note(event: str, **more: Any) -> None:
        if "object storage" in event:  # there is a word about the master key, too
            told.append(more)

    monkeypatch.setattr(assemble.log, "warning", note)
    with monkeypatch.context() as patched:
        patched.setattr(assemble, "ObjectStore", kind)
        patched.setattr(assemble, "_OBJECTS_PATIENCE", 0.05)
        await start(settings)
    [warning] = told
    assert why in warning["error"]
    await start(settings)
    assert len(told) == 1
