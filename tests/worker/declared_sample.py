"""Declared jobs that the worker's tests call."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from datetime import UTC, date, datetime
from typing import Any

from tocsin import App, Context, GiveUp, Retry

app = App("sdk")


class NoMoney(GiveUp):
    """Says that trying again is useless, in words of its own."""


@app.job(cron="0 9 * * MON-FRI", timezone="America/New_York", retries=5, timeout="10m")
async def daily(ctx: Context, region: str = "us") -> str:
    ctx.log.info("rendering", region=region)
    return region


@app.job
async def typed(day: date, pages: int = 1) -> Any:
    return {"day": f"{day:%A}", "pages": pages + 1}


@app.job
def ends(how: str) -> None:
    if how == "later":
        raise Retry("busy", after="90s")
    raise NoMoney("broke")


@app.job
async def counts(ctx: Context, up_to: int, wait: bool = True) -> Any:
    """Counts on from where an attempt before stopped."""
    for n in range(ctx.saved or 0, up_to):
        ctx.progress((n + 1) / up_to)
        saving = ctx.checkpoint(n + 1)
        if wait:
            await saving
    return {"from": ctx.saved, "left": 0 < ctx.remaining < 60, "deadline": ctx.deadline > datetime.now(UTC)}


@app.job
def counts_in_a_thread(ctx: Context, size: int = 1) -> Any:
    ctx.checkpoint({"state": "x" * size})
    return ctx.saved


@app.job
def heeds(ctx: Context) -> str:
    """Ends by itself when it is asked to, and says so."""
    cancelled = ctx.cancelled
    print("listening")
    assert isinstance(cancelled, threading.Event)
    cancelled.wait(60)
    print("heard it")
    return "ended by itself"


@app.job
async def heeds_not(ctx: Context) -> None:
    ctx.cancelled.is_set()
    print("listening")
    await asyncio.sleep(60)


@app.job(isolation="process")
def alone(seconds: float = 0.0) -> int:
    print("alone in", os.getpid())
    time.sleep(seconds)
    return os.getpid()


@app.job(isolation="process")
def alone_with_children() -> None:
    print("child", subprocess.Popen(["sleep", "300"]).pid)
    while True:
        time.sleep(0.01)


@app.job(isolation="process")
def alone_leaves_children(how: str) -> int:
    """Ends by itself, and leaves a child behind that shares nothing with it."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True, env={})
    print("child", child.pid)
    if how == "raises":
        raise ValueError(how)
    return child.pid


@app.job(isolation="process")
async def alone_async(code: int | None = None) -> int:
    if code is not None:
        os._exit(code)
    return os.getpid()


@app.job
async def crashes() -> None:
    os._exit(9)


@app.job
async def together() -> int:
    return os.getpid()


with app.workflow("sdk-nightly", cron="0 2 * * *"):
    daily >> typed >> ends.on("failure")
