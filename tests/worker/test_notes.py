"""Notes on their way: of each run the latest, nothing of a run that has ended, and an answer to every checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests import PATIENCE
from tocsin.client.app import Function
from tocsin.client.failures import Superseded
from tocsin.wire import RunKey, RunNote
from tocsin.worker import notes
from tocsin.worker.frames import Call, CallTarget, Note
from tocsin.worker.link import Link, Refused, Unreachable
from tocsin.worker.runner.notes import CHECKPOINT_BYTES, Notes
from tocsin.worker.runner.run import Run

KEY: RunKey = ("r", 1)


def a_run(cell: int = 0) -> Run:
    call = Call(cell, 0, "r", 1, 1, "j", None, "2026-01-01T00:00:00Z", None, "", 1000, 0, 1)
    return Run(call, CallTarget("f", [], {}), Function("f", lambda: None))


# ── in the runner ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_frame_has_the_latest_progress_of_each_run_and_every_checkpoint() -> None:
    woken: list[int] = []
    desk, first, second = Notes(lambda: woken.append(1)), a_run(0), a_run(1)
    for fraction in (0.1, 0.2, 0.3):
        desk.progressed(first, fraction)
    desk.progressed(second, 0.5)
    saving = desk.keep(first, {"n": 1})
    [checkpoint, *progress] = desk.take()
    assert (checkpoint.cell, msgspec.msgpack.decode(checkpoint.checkpoint)) == (0, {"n": 1})
    assert [(note.cell, note.progress) for note in progress] == [(0, 0.3), (1, 0.5)]
    assert len(woken) == 5 and desk.take() == []
    desk.answered(first.ref, checkpoint.number, "")
    saving.wait()


def test_an_ended_run_speaks_in_the_frame_of_its_end_and_never_after() -> None:
    desk, run = Notes(lambda: None), a_run(3)
    in_time = desk.keep(run, 1)
    run.ended = True
    [note] = desk.take()
    run.told = True
    desk.answered(run.ref, note.number, "the worker was lost")
    late = desk.keep(run, 2)
    desk.progressed(run, 1.0)
    assert desk.take() == []
    for saving, why in ((in_time, "lost"), (late, "ended")):
        with pytest.raises(Superseded, match=why):
            saving.wait()


def test_what_is_too_large_or_no_json_is_refused_at_once() -> None:
    desk = Notes(lambda: None)
    with pytest.raises(ValueError, match="65,536"):
        desk.keep(a_run(), "x" * CHECKPOINT_BYTES)
    with pytest.raises(TypeError):
        desk.keep(a_run(), object())
    assert desk.take() == []


# ── in the agent ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Server(Link):
    """Answers as it is told to, and remembers what was sent."""

    def __init__(self, *answers: Exception | bool) -> None:
        self.answers = list(answers)
        self.sent: list[RunNote] = []
        self.heard = asyncio.Event()

    async def note(self, worker_id: str, notes: list[RunNote], timeout: float) -> list[RunKey]:
        answer = self.answers.pop(0) if self.answers else True
        self.sent += notes
        self.heard.set()
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return [(n.run_id, n.fence) for n in notes] if answer else []


@contextlib.asynccontextmanager
async def shipping(server: Server) -> AsyncIterator[notes.NoteShipper]:
    """A shipper at work."""
    shipper = notes.NoteShipper(server, "w", lambda: None)
    task = asyncio.ensure_future(shipper.run())
    try:
        async with asyncio.timeout(PATIENCE):
            yield shipper
    finally:
        task.cancel()


def keep(shipper: notes.NoteShipper, state: Any, key: RunKey = KEY) -> asyncio.Future[str]:
    """Send a checkpoint; what became of it."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    shipper.add(key, Note(0, *key, None, 1, msgspec.Raw(msgspec.msgpack.encode(state))), told.set_result)
    return told


def states(server: Server) -> list[Any]:
    return [msgspec.msgpack.decode(note.checkpoint) for note in server.sent]


async def test_of_several_only_the_latest_is_sent_and_all_are_answered() -> None:
    server = Server()
    async with shipping(server) as shipper:
        assert await asyncio.gather(*[keep(shipper, n) for n in range(5)]) == [""] * 5
    assert states(server) == [4]


async def test_what_did_not_get_through_is_sent_again_unless_there_is_newer() -> None:
    server = Server(Unreachable("no"))
    async with shipping(server) as shipper:
        first = keep(shipper, 1)
        await server.heard.wait()
        other, newer = keep(shipper, 9, ("other", 1)), keep(shipper, 2)
        assert await asyncio.gather(first, other, newer) == ["", "", ""]
    assert sorted(states(server)) == [1, 2, 9]


async def test_every_checkpoint_is_answered_also_where_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_MOST_FAILURES", 2)
    down = Unreachable("HTTP 500")
    async with shipping(Server(False, Refused("HTTP 404: an older server"), down, down)) as shipper:
        assert "not its run's" in await keep(shipper, 1)
        assert "older server" in await keep(shipper, 2)
        assert "HTTP 500" in await keep(shipper, 3)
        assert await keep(shipper, 4) == ""


async def test_a_note_that_is_refused_keeps_no_other_run_from_its_own() -> None:
    server = Server(Refused("HTTP 422: one of them"), Refused("HTTP 422: this one"))
    async with shipping(server) as shipper:
        refused, kept = keep(shipper, 1), keep(shipper, 2, ("other", 1))
        assert "this one" in await refused and await kept == ""
    assert states(server) == [1, 2, 1, 2]


async def test_progress_alone_is_sent_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "PROGRESS_AFTER", 0.01)
    server = Server()
    async with shipping(server) as shipper:
        for fraction in (0.1, 0.2):
            shipper.add(KEY, Note(0, *KEY, fraction), None)
        await server.heard.wait()
    assert [(note.run_id, note.progress, note.checkpoint) for note in server.sent] == [("r", 0.2, msgspec.UNSET)]
