from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest_asyncio

from tests import PATIENCE

from .gateway import Gateway

HERE = Path(__file__).parent
HOSTILE = (sys.executable, str(HERE / "hostile.py"))


@asynccontextmanager
async def worker(gateway: Gateway, **given: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a real worker process against the gateway. It is killed at the end if it still lives. Unless it `may_fail`,
    it must not write a traceback."""
    may_fail = given.pop("may_fail", False)
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "TOCSIN_WORKER_KEY": "the-key", "SECRET_OF_WORKER": "x"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "launch.py"),
        json.dumps({"url": gateway.url, **given}),
        cwd=HERE,
        env=env,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        assert process.stderr is not None
        text = (await process.stderr.read()).decode()
        await process.wait()
        sys.stderr.write(text)
        assert may_fail or "Traceback" not in text.replace("Traceback expected", "")


@asynccontextmanager
async def started(lease: float = 10.0, heartbeat: float = 0.5, **given: Any) -> AsyncIterator[Any]:
    """A gateway and a worker that waits for its first run."""
    async with Gateway(lease, heartbeat) as gateway, worker(gateway, **given) as process:
        await gateway.until(lambda: gateway.claims_open)
        yield gateway, process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Gateway]:
    """One gateway with one worker for all tests of a module; a stop takes half a second to become a kill."""
    async with started(module="sample:app", grace=0.5, heartbeat=0.2) as (gateway, _):
        yield gateway


async def until(condition: Callable[[], Any], within: float = PATIENCE) -> Any:
    """Wait for something outside the protocol to become true."""
    async with asyncio.timeout(within):
        while not (found := condition()):  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.01)
        return found


def naming(path: Path) -> list[int]:
    """The processes that have the path among their arguments."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(path) in (p.info["cmdline"] or []) and alive(p.pid)]


def last_tick(file: Path) -> float:
    """The last instant that was written whole."""
    return float(file.read_text().rpartition("\n")[0].split()[-1])


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
