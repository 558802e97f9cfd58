"""When a worker lacks what it needs itself: no run is lost sight of, and none that cannot end holds its slot."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tocsin.worker import executors, proctree
from tocsin.worker.executors.process import ProcessExecutor
from tocsin.worker.proctree import Family, Found, Tree
from tocsin.worker.targets import ProcessTarget

from .conftest import alive, started, until
from .remote_kit import Book, attempt_of


async def test_a_run_that_cannot_be_killed_for_want_of_file_descriptors_is_killed_later() -> None:
    async with started(slots=8, grace=0.1, heartbeat=0.2) as (gateway, process):
        run = gateway.process("sh", "-c", "trap 'echo asked' TERM; echo up; while :; do sleep 0.02; done")
        await gateway.line_of(run, "up")
        worker = psutil.Process(process.pid)
        usual = worker.rlimit(psutil.RLIMIT_NOFILE)
        worker.rlimit(psutil.RLIMIT_NOFILE, (worker.num_fds(), usual[1]))
        refused = await gateway.end_of(gateway.process("true"))
        assert refused.error is not None and refused.error.class_ == "start"
        gateway.order_stop(run)
        await gateway.line_of(run, "asked")
        seen = len(gateway.reports)
        await gateway.until(lambda: len(gateway.reports) > seen + 3)  # the grace is over long since
        assert run.run_id not in gateway.finished, "there is no proof that it has ended"
        worker.rlimit(psutil.RLIMIT_NOFILE, usual)
        assert (await gateway.end_of(run)).outcome == "cancelled"


class Powerless(Family):
    """May not signal what has become somebody else's, as a program is that `sudo` has started."""

    def kill_once(self, tree: Tree) -> Found:
        return Found({tree.root}, {tree.root})


@pytest.fixture
async def powerless(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ProcessExecutor, Book]]:
    monkeypatch.setattr(executors, "_UNTOUCHABLE_FOR", 0.1)
    monkeypatch.setattr("tocsin.worker.executors.process.STOP_GRACE", 0.1)
    monkeypatch.setattr(proctree, "signal_group", lambda *_: None)
    executor, book = ProcessExecutor("http://localhost", Powerless()), Book()
    executor.sink = book
    yield executor, book
    await executor.close()


@pytest.mark.parametrize("outcome", ["timeout", "cancelled"])
async def test_a_program_that_cannot_be_killed_does_not_hold_its_slot(
    powerless: tuple[ProcessExecutor, Book], outcome: str
) -> None:
    executor, book = powerless
    target = ProcessTarget(command=["sh", "-c", "echo $$; exec sleep 300"])
    attempt = attempt_of(executor, target, timeout=0.5 if outcome == "timeout" else 60)  # type: ignore[arg-type]
    [line] = await book.until(lambda: book.lines.get(attempt.key))
    pid = int(line.removeprefix("stdout: "))
    if outcome == "cancelled":
        executor.stop(attempt)
    told, _, message = await book.end_of(attempt)
    assert told == outcome and "could not be killed" in message
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not psutil.pid_exists(pid))  # it is reaped, too


async def test_a_fault_of_ours_ends_the_run_and_frees_its_slot(
    powerless: tuple[ProcessExecutor, Book], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, book = powerless
    monkeypatch.setattr(executor._folders, "remove", None)
    target = ProcessTarget(command=["true"])
    outcome, error_class, message = await book.end_of(attempt_of(executor, target))  # type: ignore[arg-type]
    assert (outcome, error_class) == ("failed", "worker") and "whether it still runs is not known" in message
    assert not executor._running


async def test_what_was_started_and_cannot_be_seen_through_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family, book, pids = Family(), Book(), tmp_path / "pids"
    executor = ProcessExecutor("http://localhost", family)
    executor.sink = book

    def no_file_descriptor(_: int) -> int:
        while not pids.exists():  # until it has forked, and written into its folder
            os.sched_yield()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("tocsin.worker.executors.process.os.pidfd_open", no_file_descriptor)
    script = f"setsid sleep 300 & pwd > here; echo $! $PWD > {pids}.new; mv {pids}.new {pids}; wait"
    attempt = attempt_of(executor, ProcessTarget(command=["sh", "-c", script]))  # type: ignore[arg-type]
    outcome, error_class, message = await book.end_of(attempt)
    assert (outcome, error_class) == ("failed", "start") and "Too many open files" in message
    pid, folder = pids.read_text().split()
    assert not alive(int(pid)) and not os.access(folder, os.F_OK)
    monkeypatch.undo()
    after = attempt_of(executor, ProcessTarget(command=["true"]))  # type: ignore[arg-type]
    assert await book.end_of(after) == ("succeeded", None, "")
    await executor.close()


async def test_a_worker_opens_as_many_files_as_it_may_and_its_programs_as_many_as_is_usual(tmp_path: Path) -> None:
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with started() as (gateway, process):
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (most, most)
        go = tmp_path / "go"
        run = gateway.process("sh", "-c", f"echo up; while [ ! -e {go} ]; do sleep 0.02; done; ulimit -Sn")
        await gateway.line_of(run, "up")
        go.touch()
        await gateway.end_of(run)
        assert gateway.text_of(run) == ["up", str(min(usual, 65_536))]
