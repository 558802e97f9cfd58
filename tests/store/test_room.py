"""room: what is left of disks, connections and queues, and what piles up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.washed import database_url, db, washed_database
from tocsin.store import room as module
from tocsin.store.db import Database
from tocsin.store.room import Room
from tocsin.telemetry import CONNECTIONS, DEAD_RATIO, DISK_FREE, NOTIFY_QUEUE, REGISTRY, SLOT_RETAINED

__all__ = ["database_url", "db", "washed_database"]


def told(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"tocsin_{name}", labels)


async def test_what_is_left_is_told(db: Database, tmp_path: Path) -> None:
    for gauge in (CONNECTIONS, NOTIFY_QUEUE, SLOT_RETAINED):
        gauge.set(-1)
    DISK_FREE.clear()
    DEAD_RATIO.clear()
    await Room(db, {"logs": tmp_path, "table": tmp_path / "not there"}).look()
    most = int(await db.fetchval("engine", "select current_setting('max_connections')"))
    assert 1 / most <= (told("pg_connections_ratio") or 0) <= 1
    assert told("pg_notify_queue_ratio") == 0 and told("pg_slot_retained_bytes") == 0
    assert 0 < (told("disk_free_ratio", on="logs") or 0) < 1
    assert told("disk_free_ratio", on="table") is None, "nothing is told of what cannot be seen"
    assert all((told("queue_dead_ratio", table=name) or 0) >= 0 for name in ("runs", "triggers", "limits", "workers"))
    assert told("queue_dead_ratio", table="runs") is not None


async def test_a_full_disk_is_told_as_one(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(module.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage(1000, 990, 10))
    await Room(db, {"logs": tmp_path}).look()
    assert told("disk_free_ratio", on="logs") == 0.01
