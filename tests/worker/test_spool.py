"""Lines that wait for a server: in memory, then on disk, in order; what does not fit there is missed out loud."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests import PATIENCE
from tocsin.wire import ClaimedRun, LogChunk, LogLine
from tocsin.worker import logs
from tocsin.worker.link import LogConflict, Unreachable
from tocsin.worker.logs import LogShipper, RunLog
from tocsin.worker.spool import Spool


class Server:
    """Takes chunks as the real one does, when it is there."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.asked = asyncio.Event()
        self.lines: dict[str, list[str]] = defaultdict(list)
        self.refuses: set[str] = set()
        self.shipments = 0

    async def ship_logs(self, worker_id: str, chunks: list[LogChunk], timeout: float) -> None:
        self.asked.set()
        self.shipments += 1
        if not self.there.is_set():
            await asyncio.sleep(0)
            raise Unreachable("away")
        if any(chunk.run_id in self.refuses for chunk in chunks):
            raise LogConflict("superseded", None)
        for chunk in chunks:
            have = self.lines[chunk.run_id]
            if chunk.offset > len(have):
                raise LogConflict("log_gap", len(have))
            have += [line[3] for line in chunk.lines][len(have) - chunk.offset :]


@asynccontextmanager
async def shipping(server: Server) -> AsyncIterator[LogShipper]:
    shipper = LogShipper(server, "w")  # type: ignore[arg-type]
    shipper.start()
    try:
        yield shipper
    finally:
        await shipper.stop()


def log_of(run_id: str) -> RunLog:
    told = {"start_at": "", "timeout_ms": 1, "job_id": "", "scheduled_for": "", "token": ""}
    return RunLog(msgspec.convert({"run_id": run_id, "attempt": 1, "fence": 7, **told}, ClaimedRun))


def lines(*texts: str) -> list[LogLine]:
    return [(1.0, "stdout", "info", text) for text in texts]


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 (a thread writes, and tells nobody)
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEPT", 20_000)
    monkeypatch.setattr(logs, "_MAX_SHIPMENT", 4_000)


async def test_an_outage_loses_nothing_and_costs_little_memory() -> None:
    server = Server()
    async with shipping(server) as shipper:
        some = [log_of(f"r{i}") for i in range(5)]
        wanted: dict[str, list[str]] = defaultdict(list)
        for turn in range(200):
            for number, log in enumerate(some):
                if turn % (number + 1) == 0:
                    texts = [f"{number}.{turn}.{i} {'x' * 50}" for i in range(3)]
                    wanted[log.run.run_id] += texts
                    shipper.add(log, lines(*texts), 0)
            await asyncio.sleep(0)
        await until(lambda: shipper._size <= logs.KEPT)
        assert any(log.away for log in some)
        server.there.set()
        for log in some:  # they go on while the rest is fetched
            shipper.add(log, lines("last"), 0)
            wanted[log.run.run_id].append("last")
        await asyncio.wait_for(shipper.all_arrived.wait(), PATIENCE)
        assert server.lines == wanted
        assert all(log.summary() == {"lines": len(wanted[log.run.run_id]), "dropped": 0} for log in some)
        assert shipper._size == 0 and shipper._spool._file is None


async def test_one_run_that_is_superseded_does_not_make_a_request_of_every_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "_MAX_SHIPMENT", 1_000_000)
    server = Server()
    server.there.set()
    server.refuses.add("r700")
    async with shipping(server) as shipper:
        some = [log_of(f"r{i}") for i in range(1000)]
        for log in some:
            shipper.add(log, lines("x"), 0)
        await asyncio.wait_for(shipper.all_arrived.wait(), PATIENCE)
    assert {run_id for run_id, told in server.lines.items() if told} == {f"r{i}" for i in range(1000) if i != 700}
    assert server.shipments <= 25, "all, and then halves of those with the one among them"


async def test_what_fits_nowhere_is_missed_out_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "SPOOLED", 30_000)
    monkeypatch.setattr(logs, "_MAX_HELD", 40_000)
    server = Server()
    async with shipping(server) as shipper:
        log = log_of("r")
        for i in range(2000):
            shipper.add(log, lines(f"{i} {'x' * 50}"), 0)
            await asyncio.sleep(0)
        ended = asyncio.Event()
        shipper.close(log, ended.set)
        server.there.set()
        await asyncio.wait_for(shipper.all_arrived.wait(), PATIENCE)
        found, dropped = server.lines["r"], log.summary()["dropped"]
        told = [line for line in found if line.startswith("[tocsin: ")]
        assert dropped > 0 and sum(int(line.split()[1]) for line in told) == dropped
        numbers = [int(line.split()[0]) for line in found if line not in told]
        assert numbers == sorted(set(numbers)) and len(numbers) == 2000 - dropped
        assert ended.is_set()


async def test_a_refused_log_leaves_nothing_on_disk() -> None:
    server = Server()
    async with shipping(server) as shipper:
        log = log_of("r")
        shipper.add(log, lines(*["x" * 100] * 1000), 0)
        await until(lambda: log.away)
        server.refuses.add("r")
        server.there.set()
        await asyncio.wait_for(shipper.all_arrived.wait(), PATIENCE)
        assert log.summary() == {"lines": 0, "dropped": 1000}
        assert shipper._size == 0 and shipper._spool._file is None


async def test_lines_that_the_server_has_lost_are_missed_out_loud_and_the_log_goes_on() -> None:
    server = Server()
    server.there.set()
    async with shipping(server) as shipper:
        log = log_of("r")
        shipper.add(log, lines("a", "b", "c"), 0)
        await asyncio.wait_for(shipper.all_arrived.wait(), PATIENCE)
        del server.lines["r"][1:]
        for text in ("d", "e"):
            shipper.add(log, lines(text), 0)
            await asyncio.wait_for(shipper.all_arrived.wait(), PATIENCE)
        assert server.lines["r"] == ["a", "[tocsin: 2 lines left out: the server has lost them]", "d", "e"]
        assert log.summary() == {"lines": 4, "dropped": 2} and shipper._size == 0


async def test_a_disk_that_fails_costs_lines_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    async with shipping(server) as shipper:
        log = log_of("r")
        shipper.add(log, lines(*["x" * 100] * 300), 0)
        await until(lambda: log.away)
        away = sum(piece.lines for piece in log.away)

        def broken(*_: object) -> bytes:
            raise OSError("gone")

        monkeypatch.setattr(os, "pread", broken)
        monkeypatch.setattr(os, "pwrite", broken)
        shipper.add(log, lines(*["y" * 100] * 300), 0)
        server.there.set()
        await asyncio.wait_for(shipper.all_arrived.wait(), PATIENCE)
        assert log.dropped >= away and server.lines["r"][-1] == "y" * 100
        assert any("the worker's disk has lost them" in line for line in server.lines["r"])


async def test_a_spool_is_bounded_and_gives_its_room_back() -> None:
    spool = Spool(100)
    first, second = await spool.put(b"a" * 60), await spool.put(b"b" * 40)
    assert first is not None and second is not None and await spool.put(b"c") is None
    assert await spool.take(first) == b"a" * 60
    assert await spool.put(b"c") is None  # it is written at its end only
    assert await spool.take(second) == b"b" * 40
    assert await spool.put(b"d" * 100) is not None


async def test_what_cannot_be_read_back_leaves_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bytes:
        raise OSError("the disk is gone")

    spool = Spool(1000)
    piece = await spool.put(b"x" * 600)
    assert piece is not None and spool.room == 400
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(OSError):
        await spool.take(piece)
    assert spool.room == 1000
