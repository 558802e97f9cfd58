"""What the benchmarks' worker serves: `tocsin worker bench.jobs:app`."""

import asyncio
import os
import time
from datetime import date

from tocsin import App, Context

app = App()
_kept: dict[str, int] = {}
_gates: dict[str, asyncio.Task[None]] = {}


@app.function("bench.noop")
async def noop() -> None:
    """Nothing: what is left is the scheduler's own cost."""


@app.function("bench.typed")
async def typed(ctx: Context, day: date, pages: int = 1) -> None:
    """Nothing either, but it wants to be told all that can be told."""


@app.function("bench.sleep")
async def sleep() -> None:
    """Waits until it is cancelled."""
    await asyncio.sleep(3600)


@app.function("bench.hold")
async def hold(gate: str) -> None:
    """Run until the file `gate` has content. One thread checks the file for all calls."""
    if gate not in _gates:
        _gates[gate] = asyncio.create_task(asyncio.to_thread(_await_text, gate))
    await asyncio.shield(_gates[gate])


def _await_text(path: str) -> None:
    while not os.stat(path).st_size:
        time.sleep(0.2)


@app.function("bench.sleep_in_thread")
def sleep_in_thread() -> None:
    """The same in a thread, looking up now and then so that it can be interrupted."""
    while True:
        time.sleep(0.5)


@app.function("bench.mark")
async def mark(path: str, sent: float) -> None:
    """Its first act is one O_APPEND write of "<start> <sent>"."""
    started = time.time()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{started!r} {sent!r}\n".encode())
    os.close(descriptor)


@app.function("bench.start")
async def start(path: str) -> None:
    """Its first act is to look at the clock; then one O_APPEND write of what it saw, to a file that stays open."""
    started = time.time()
    if path not in _kept:
        _kept[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(_kept[path], f"{started!r}\n".encode())


@app.function("bench.call")
async def call(path: str, down: str) -> None:
    """A call of something that is down while the file `down` is there; one O_APPEND write of when it came."""
    came = time.time()
    if path not in _kept:
        _kept[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(_kept[path], f"{came!r}\n".encode())
    if os.access(down, os.F_OK):
        raise ConnectionRefusedError("it is down")
