"""The parts that need no process: lines, clocks, frames."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from tests import PATIENCE
from tocsin.client.app import App
from tocsin.clock import DRIFT, EPOCH, boottime, iso
from tocsin.worker import machine
from tocsin.worker.channel import Channel
from tocsin.worker.lines import LINE_BYTES, LineSplitter, OutputLimit, clean
from tocsin.worker.link import Link, LogConflict, Refused, UnknownWorker, Unreachable, WrongProtocol
from tocsin.worker.timing import Lease, ServerClock, instant


def test_lines_come_out_whole_however_the_bytes_come_in() -> None:
    data = b"one\ntwo\r\n\nlast"
    for size in range(1, len(data) + 1):
        splitter = LineSplitter()
        lines = [line for i in range(0, len(data), size) for line in splitter.feed(data[i : i + size])]
        assert [*lines, *splitter.end()] == ["one", "two", "", "last"]


def test_a_line_without_end_is_cut_and_not_gathered() -> None:
    splitter = LineSplitter()
    lines = [line for _ in range(100) for line in splitter.feed(b"x" * 1000)]
    assert sum(map(len, lines)) > 100_000 - LINE_BYTES - 1000 and max(map(len, lines)) == LINE_BYTES


def test_what_no_store_takes_is_escaped() -> None:
    assert clean("a\tb\0c\ud800d\u2028\x7f") == "a\tb\\x00c\\ud800d\\u2028\\x7f"


def test_what_the_machine_has() -> None:
    have = machine.resources()
    assert 0 < have["cpu"] <= (os.cpu_count() or 1) and have["memory_mb"] > 64 and have["disk_mb"] >= 0
    assert have["gpus"] == int(have["gpus"]) >= 0


def test_a_container_has_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    (tmp_path / "cpu.max").write_text("25000 100000\n")
    (tmp_path / "memory.max").write_text(f"{100 << 20}\n")
    assert (machine.resources()["cpu"], machine.resources()["memory_mb"]) == (0.25, 100)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.resources()["cpu"] >= 1 and machine.resources()["memory_mb"] > 100


def test_the_output_limit_says_so_once() -> None:
    limit = OutputLimit()
    line = "x" * (1 << 20)
    kept = [limit.take([line]) for _ in range(12)]
    assert [len(lines) for lines, _ in kept] == [1] * 10 + [0, 0] and "dropped" in kept[9][0][0]
    assert sum(dropped for _, dropped in kept) == 3


def test_a_lease_counts_from_before_the_report_was_sent() -> None:
    sent = boottime() - 7.0
    lease = Lease(10.0, sent)
    assert lease.margin == 2.0 and lease.deadline == sent + 8.0 and not lease.over
    lease.renew(sent - 5.0)  # an older answer that comes late shortens nothing
    assert lease.deadline == sent + 8.0
    assert Lease(10.0, sent - 1.1).over


def test_the_servers_clock_is_never_ahead_and_follows_a_step_back() -> None:
    clock = ServerClock()
    base = instant("2026-12-01T09:00:00.000000Z")
    clock.observe("2026-12-01T09:00:00.000000Z", 100.0, 103.0)
    assert clock.monotonic_of(base) == 103.0
    clock.observe("2026-12-01T09:00:10.000000Z", 110.0, 110.5)  # a quicker answer knows better
    assert clock.monotonic_of(base) == 100.5
    clock.observe("2026-12-01T09:00:20.000000Z", 120.0, 125.0)  # a slow one teaches nothing
    assert clock.monotonic_of(base) == 100.5
    clock.observe("2026-12-01T08:59:00.000000Z", 130.0, 130.1)  # stepped back 90 s
    assert clock.monotonic_of(base + 130) == pytest.approx(320.1, abs=0.05)


@given(
    drift=st.floats(-DRIFT / 2, DRIFT / 2),
    answers=st.lists(st.tuples(st.floats(0.1, 600), st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=20),
    after=st.floats(0, 600),
)
def test_the_servers_clock_is_never_ahead_however_the_clocks_drift(
    drift: float, answers: list[tuple[float, float, float]], after: float
) -> None:
    clock, here = ServerClock(), 1000.0

    def there(monotonic: float) -> float:
        return 1.8e9 + monotonic * (1 + drift)

    for pause, to, back in answers:
        sent, here = here + pause, here + pause + to + back
        clock.observe(iso(EPOCH + timedelta(seconds=there(sent + to))), sent, here)
    wanted = there(here + after)
    assert clock.monotonic_of(wanted) >= here + after - 2e-6, "it begins before the server's clock is there"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "", Refused),
        (403, "", Refused),
        (426, "protocol_too_old", WrongProtocol),
        (410, "unknown_worker", UnknownWorker),
        (404, "unknown_worker", UnknownWorker),
        (404, "not_found", Unreachable),
        (409, "log_gap", LogConflict),
        (409, "superseded", LogConflict),
        (500, "", Unreachable),
        (503, "", Unreachable),
        (429, "", Unreachable),
    ],
)
async def test_what_an_answer_means(status: int, code: str, kind: type[Exception]) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"code": code, "expected_offset": 3}, status=status)

    app = web.Application()
    app.router.add_post("/v1/worker/w/logs", answer)
    async with TestServer(app) as server, Link(str(server.make_url("/")), "the-key") as link:
        with pytest.raises(kind):
            await link.ship_logs("w", [], 5.0)


async def test_a_channel_carries_large_frames_both_ways_and_is_read_to_the_end() -> None:
    a, b = socket.socketpair()
    got: list[bytes] = []
    faults: list[Exception] = []
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()
    left, right = (Channel(end, loop, got.append, closed.set, faults.append) for end in (a, b))
    frames = [b"", b"x", b"y" * 3_000_000, b"z"]
    for frame in frames:
        left.send(frame)
    async with asyncio.timeout(PATIENCE):
        while len(got) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert got == frames and left.backlog == 0
        left.send(b"last words")
        left.close()
        right.drain()
    assert got[-1] == b"last words" and closed.is_set() and not faults


def test_an_app_names_its_functions() -> None:
    app = App()

    @app.function
    def plain() -> None: ...

    @app.function("dotted.name")
    async def other(ctx: object) -> None: ...

    assert set(app.functions) == {"plain", "dotted.name"}
    assert not app.functions["plain"].is_async and not app.functions["plain"].wants_context
    assert app.functions["dotted.name"].is_async and app.functions["dotted.name"].wants_context
    with pytest.raises(ValueError, match="plain"):
        app.function("plain")(other)


async def test_large_things_that_are_fetched_do_not_keep_reports_from_getting_through() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def payload(request: web.Request) -> web.Response:
        asked.set()
        await go_on.wait()
        return web.json_response({})

    async def report(request: web.Request) -> web.Response:
        return web.json_response({"accepted": [], "superseded": [], "stop": [], "drain": False, "now": iso(EPOCH)})

    app = web.Application()
    app.router.add_get("/v1/payloads/{token}", payload)
    app.router.add_post("/v1/worker/w/report", report)
    async with TestServer(app) as server, Link(str(server.make_url("")), "k") as link:
        digest = hashlib.sha256(b"{}").hexdigest()
        fetches = [asyncio.ensure_future(link.fetch(f"/v1/payloads/{n}", digest, 60.0)) for n in range(40)]
        await asked.wait()
        assert (await link.report("w", b"", 10.0)).now == iso(EPOCH)
        go_on.set()
        assert await asyncio.gather(*fetches) == [{}] * 40
