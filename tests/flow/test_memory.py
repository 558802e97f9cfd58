"""Caches that are bounded by bytes, and the modules that use them."""

from __future__ import annotations

from typing import Any

from tests.flow.kit import Scene
from tocsin.flow.shared import calendars
from tocsin.flow.shared.memory import Memory
from tocsin.flow.shared.specs import SpecBook

KIB = 1024


def test_a_cache_keeps_the_latest_values_up_to_its_bytes() -> None:
    memory: Memory[int, str] = Memory(10 * KIB)
    for key in range(100):
        memory.put(key, str(key), KIB)
    assert len(memory) == 6 and memory.size <= 10 * KIB
    assert [memory.get(key) for key in (93, 94, 99)] == [None, "94", "99"]
    memory.put(99, "large", 20 * KIB)
    assert memory.get(99) is None, "what is larger than all of it is not kept, and what it replaces is gone"
    for _ in range(100):
        memory.put(98, "98", KIB)
    assert len(memory) == 5, "what is put in again counts once"


async def test_large_job_documents_are_kept_by_their_bytes(scene: Scene) -> None:
    specs: list[Any] = []
    for n in range(12):
        env = {"TEXT": "x" * 60 * KIB}
        job = await scene.job(target={"kind": "process", "command": ["true", str(n)], "env": env})
        specs.append((await scene.value("select tenant_id from jobs where id = $1", job["id"]), job["id"], 1))
    book = SpecBook(scene.db, most=1024 * KIB)
    found = await book.get(specs)
    assert len(found) == 12, "all that were asked for are answered"
    assert 0 < book._known.size <= 1024 * KIB and len(book._known) < 5
    again = await book.get(specs)
    assert {key: stored.text for key, stored in again.items()} == {key: stored.text for key, stored in found.items()}


async def test_a_calendar_evicted_during_a_read_is_still_returned(scene: Scene, monkeypatch: Any) -> None:
    monkeypatch.setattr(calendars, "_kept", Memory(0))
    await scene.api.call("PUT", "/v1/calendars/days", json={"days": ["2026-12-24"]})
    tenant_id = await scene.value("select id from tenants where slug = 'default'")
    key = calendars.CalendarKey(tenant_id, "days")
    async with scene.db.transaction("test") as connection:
        for _ in range(2):
            assert list(await calendars.read(connection, [key])) == [key]
