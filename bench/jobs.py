"""What the benchmarks' worker serves: `tocsin worker bench.jobs:app`."""

import os
import time

from tocsin.client.app import App

app = App()
_kept: dict[str, int] = {}


@app.function("bench.noop")
async def noop() -> None:
    """Nothing: what is left is the scheduler's own cost."""


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
