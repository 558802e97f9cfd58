"""Entry of the runner: `module:app url slots socket-fd table-fd`, started by the agent only."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from typing import NoReturn, TextIO, cast

import uvloop

from tocsin.client.app import App, Function
from tocsin.client.failures import dotted, text_of
from tocsin.model.loglines import clean
from tocsin.worker.channel import Channel
from tocsin.worker.frames import Table
from tocsin.worker.runner.calls import Calls
from tocsin.worker.runner.forks import brand_children
from tocsin.worker.runner.output import RunStream
from tocsin.worker.runner.vital import give_up


def load(reference: str) -> App:
    """The `App` that `module:app` names."""
    module_name, _, name = reference.partition(":")
    app = getattr(importlib.import_module(module_name), name or "app")
    if not isinstance(app, App):
        raise TypeError(f"{reference} is not a tocsin.App but a {type(app).__name__}")
    return app


async def serve(reference: str, url: str, slots: int, sock: socket.socket, table: Table) -> None:
    """Load the module and send the hello. After that the channel calls the requested functions until the agent is
    gone."""
    brand_children()
    loop = asyncio.get_running_loop()
    functions: dict[str, Function] = {}
    calls = Calls(functions, slots, table, url, loop)
    calls.channel = Channel(sock, loop, calls.on_frame, lambda: os._exit(1), give_up)
    # Before the module is loaded, so that the log handlers it makes write here too.
    sys.stdout = cast(TextIO, RunStream("stdout", sys.stdout, calls.output))
    sys.stderr = cast(TextIO, RunStream("stderr", sys.stderr, calls.output))
    try:
        app = load(reference)
        functions.update(app.functions)
        jobs = [job.document for job in app.jobs.values()]
        workflows = [workflow.document for workflow in app.workflows.values()]
        for function in functions.values():
            function.arguments  # noqa: B018 — now, so that no run waits for it
    except BaseException as exc:
        traceback.print_exc()
        calls.greet(f"{reference} cannot be loaded: {dotted(type(exc))}: {clean(text_of(exc))}")
    else:
        gc.freeze()
        calls.greet(jobs=jobs, workflows=workflows)


def run_forever(loop: asyncio.AbstractEventLoop) -> NoReturn:
    """Run the loop until the process ends. `SystemExit` and `KeyboardInterrupt` in a task of a function leave the loop,
    and so does `loop.stop()`. They end only that function, not the other runs."""
    while True:
        try:
            loop.run_forever()
        except BaseException as exc:
            print(f"tocsin: {dotted(type(exc))} left the event loop, which goes on", file=sys.__stderr__)


def main() -> None:
    """Take over what the agent left on the command line."""
    reference, url, slots, socket_fd, table_fd = sys.argv[1:]
    for fd in map(int, (socket_fd, table_fd)):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides when we stop
    sock = socket.socket(fileno=int(socket_fd))
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(serve(reference, url, int(slots), sock, Table(int(slots), int(table_fd))))
    run_forever(loop)


main()
