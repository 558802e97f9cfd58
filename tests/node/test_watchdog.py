"""The watchdog names and counts the code that holds the event loop, with its stack."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import until
from tocsin.node import watchdog as module
from tocsin.node.watchdog import Watchdog
from tocsin.telemetry import LOOP_HELD

PATIENCE = 120.0


class Lines:
    """A stand-in for the log."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.some = threading.Event()

    def warning(self, _event: str, **fields: Any) -> None:
        self.told.append(fields)
        self.some.set()

    def error(self, event: str, **fields: Any) -> None:
        raise AssertionError((event, fields))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    found = Lines()
    monkeypatch.setattr(module, "log", found)
    return found


@pytest.fixture
async def watchdog() -> Any:
    watching = Watchdog(held_seconds=0.2, speak_seconds=3600)
    watching.start()
    yield watching
    watching.stop()


def held_times() -> float:
    [metric] = LOOP_HELD.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_count"))


def a_handler_that_waits(lines: Lines) -> None:
    assert lines.some.wait(PATIENCE)


def a_handler_that_computes(lines: Lines) -> None:
    while not lines.some.is_set():
        sum(range(30_000_000))  # holds the interpreter, too


async def until_counted(before: float) -> None:
    async def counted() -> bool:
        return held_times() > before

    await until("the time is counted", counted)


@pytest.mark.parametrize("handler", [a_handler_that_waits, a_handler_that_computes])
async def test_code_that_holds_the_loop_is_logged_with_its_stack(
    handler: Any, lines: Lines, watchdog: Watchdog
) -> None:
    before = held_times()

    async def task() -> None:
        handler(lines)

    await asyncio.create_task(task(), name="the task")
    await until_counted(before)
    [line] = lines.told
    assert line["task"] == "the task"
    assert any(frame.endswith(handler.__name__) for frame in line["calls"]), line["calls"]
    assert any(frame.endswith("task") for frame in line["calls"]), line["calls"]
    assert line["seconds"] >= 0.2


async def test_the_innermost_call_of_our_own_is_the_handler(lines: Lines, watchdog: Watchdog) -> None:
    from tocsin.model.access import Scope

    class Name(str):
        def startswith(self, *_: Any) -> bool:
            return lines.some.wait(PATIENCE)

        def endswith(self, *_: Any) -> bool:
            return False

    Scope(["a*"]).has(Name("ab"), {})
    assert lines.told[0]["handler"].startswith("tocsin/model/access.py:")
    assert lines.told[0]["handler"].endswith(" fits")


async def test_lines_are_rare_and_say_how_many_were_left_out(lines: Lines, watchdog: Watchdog) -> None:
    def hold(times: int) -> None:
        """Hold the loop until the watchdog has seen it this many times."""
        deadline = time.monotonic() + PATIENCE
        while len(lines.told) + watchdog._untold < times and time.monotonic() < deadline:
            time.sleep(0.01)

    for held in range(3):
        before = held_times()
        hold(held + 1)
        await until_counted(before)
    assert (len(lines.told), watchdog._untold) == (1, 2)


def test_a_process_that_stood_still_is_not_reported(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread, and the whole process with it, slept for an hour."""
    clock = {"now": 0.0}
    monkeypatch.setattr(module.time, "monotonic", lambda: clock["now"])

    class Suspended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock["now"] += 3600
            return False

    watching = Watchdog()
    watching._stopping, watching._watched = Suspended(), threading.get_ident()
    with open("/dev/null", "w+b") as dump:
        monkeypatch.setattr(module, "_dumped", lambda *_: [])
        watching._look(dump)
    module.faulthandler.cancel_dump_traceback_later()
    assert lines.told == []


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name == "tocsin-watchdog"]
