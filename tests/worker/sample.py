"""Functions that the worker's tests call."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tocsin.client.app import App, Context, GiveUp
from tocsin.worker.channel import Channel
from tocsin.worker.frames import Done, Replies

app = App()
LEAK = contextvars.ContextVar("leak", default="clean")


@app.function("math.add")
async def add(a: int, b: int = 0) -> int:
    return a + b


@app.function
def add_sync(a: int, b: int = 0) -> int:
    return a + b


@app.function
def compute_sync(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@app.function("clock.sync")
def clock_sync() -> float:
    return time.time()


@app.function("clock.async")
async def clock_async() -> float:
    return time.time()


@app.function
async def show(ctx: Context, **more: Any) -> dict[str, Any]:
    ctx.log.debug("quiet")
    ctx.log.warning("%s of %s", "first", "two\nsecond of two")
    await asyncio.sleep(0)
    print("printed", end="")
    print(" in pieces")
    print("and no end", end="")
    return {
        "run_id": ctx.run_id,
        "job": [ctx.job_id, ctx.job_name],
        "attempt": ctx.attempt,
        "fence": ctx.fence,
        "year": ctx.scheduled_for.year,
        "stands_for": ctx.logical_at.isoformat(),
        "args": dict(ctx.args),
        "more": more,
        "token": [ctx.token, ctx.token[::-1]],
        "url": ctx.url,
    }


@app.function
def print_sync() -> None:
    print("from a thread")
    logging.getLogger("some.library").warning("from a logger")


@app.function
async def fail() -> None:
    raise ValueError("no such\0thing")


@app.function
def fail_sync() -> None:
    raise GiveUp("for good")


@app.function
async def give_back(what: str) -> Any:
    odd = {"set": {1, 2}, "object": object(), "float": float("nan"), "int": 2**70}
    return (odd | {"big": "x" * 100_000, "huge": "x" * 2**23})[what]


@app.function
async def sleep(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slept"


@app.function
def sleep_until(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


@app.function
async def sleep_stubborn(seconds: float) -> str:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return "went on"
    return "slept"


@app.function
def spin(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "spun"


@app.function
def block(seconds: float) -> str:
    print("blocking in", os.getpid())
    time.sleep(seconds)
    return "blocked"


@app.function
async def block_loop(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 (that is the point)


@app.function
async def crash(how: str) -> None:
    await asyncio.sleep(0)
    if how == "exit":
        os._exit(7)
    os.kill(os.getpid(), signal.SIGSEGV)


@app.function
async def crash_at_once() -> None:
    os._exit(7)


@app.function
async def leak(text: str) -> str:
    before = LEAK.get()
    LEAK.set(text)
    return before


@app.function
async def uses_its_task() -> str:
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        first = group.create_task(asyncio.sleep(0.01, "grouped"))
    return first.result()


@app.function
async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@app.function
def spawn() -> int:
    return subprocess.Popen(["setsid", "sleep", "300"]).pid


@app.function
def exit_system() -> None:
    raise SystemExit(3)


def _fork_hidden(how: str, path: str) -> list[str]:
    command = [sys.executable, str(Path(__file__).parent / "hostile.py"), "hide", path]
    if how == "fork":
        if os.fork() == 0:
            os.execv(command[0], command)
    elif how == "spawn":
        os.posix_spawn(command[0], command, os.environ)
    elif how == "popen":
        subprocess.Popen(command)
    return command


@app.function("forks.sync")
def forks_sync(how: str, path: str) -> None:
    _fork_hidden(how, path)
    while True:
        time.sleep(0.01)


@app.function("forks.async")
async def forks_async(how: str, path: str) -> None:
    await asyncio.create_subprocess_exec(*_fork_hidden(how, path))
    await asyncio.sleep(60)


@app.function("hold.power")
def hold_power() -> int:
    return (7**10**9) % 10


@app.function("hold.regex")
async def hold_regex() -> bool:
    return re.match(r"(a+)+$", "a" * 60 + "b") is not None


# ── the deeds of tests/worker/conformance ────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _noted(folder: str) -> Iterator[None]:
    """There is a file while the call goes on, and another one once it is over."""
    note = Path(folder, f"{os.getpid()}-{time.monotonic_ns()}")
    note.touch()
    print("up")
    try:
        yield
    finally:
        note.with_suffix(".gone").touch()


@app.function("conformance.say")
async def say() -> None:
    print("héllo")


@app.function("conformance.say.sync")
def say_sync() -> None:
    print("héllo")


@app.function("conformance.flood")
async def flood() -> None:
    flood_sync()


@app.function("conformance.flood.sync")
def flood_sync() -> None:
    for _ in range(40_000):
        print("x" * 999)


@app.function("conformance.hog")
async def hog() -> int:
    return hog_sync()


@app.function("conformance.hog.sync")
def hog_sync() -> int:
    return len(b"x" * (600 << 20))


@app.function("conformance.wait")
async def wait(refuse: bool, folder: str) -> None:
    with _noted(folder):
        while True:
            try:
                await asyncio.sleep(300)
            except asyncio.CancelledError:
                if not refuse:
                    raise


@app.function("conformance.wait.sync")
def wait_sync(refuse: bool, folder: str) -> None:
    with _noted(folder):
        while True:
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:
                if not refuse:
                    raise


@app.function
async def confide(ctx: Context, fail: bool) -> dict[str, Any]:
    token = ctx.secrets["TOKEN"]
    if fail:
        raise ValueError(f"{token} is wrong")
    print(f"it is {token}")
    return {"names": sorted(ctx.secrets), "token": token}


@app.function
async def measure(rows: list[str]) -> int:
    return sum(map(len, rows))


@app.function
async def compare(ctx: Context) -> dict[str, object]:
    return {"results": dict(ctx.results), "states": {name: parent.state for name, parent in ctx.parents.items()}}


@app.function("gives_up_waiting")
async def gives_up_waiting(ctx: Context, value: int) -> int:
    """Cancel the wait for a checkpoint, as `asyncio.wait_for` does when its time is up."""
    waiting = asyncio.ensure_future(_saved(ctx, value))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    print("gave up waiting")
    return value


async def _saved(ctx: Context, value: int) -> None:
    await ctx.checkpoint(value)


@app.function("echo_logged")
async def echo_logged(path: str, value: int) -> int:
    """Write one line per call to a file, so that a second call of the same run is noticed."""
    with open(path, "a") as file:  # noqa: ASYNC230 (one short line)
        file.write(f"{value}\n")
    return value


@app.function("block_loop_until")
async def block_loop_until(path: str) -> None:
    while not os.path.exists(path):  # noqa: ASYNC240 (it blocks the loop on purpose)
        time.sleep(0.005)  # noqa: ASYNC251


@app.function("nested")
async def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@app.function("forge")
async def forge(run_id: str, fence: int) -> str:
    """Report the end of another run in the runner's place."""
    caller = sys._getframe(1)
    while "calls" not in caller.f_locals and caller.f_back is not None:
        caller = caller.f_back
    channel: Channel = caller.f_locals["calls"].channel
    for cell in range(8):
        done = Done(cell, run_id, fence, 1, 1, result=msgspec.Raw(msgspec.msgpack.encode("forged")))
        channel.send(msgspec.msgpack.encode(Replies(done=[done])))
    await asyncio.Event().wait()
    return "never"
