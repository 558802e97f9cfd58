"""The agent: registers, lives through sessions, and leaves nothing running when one of them is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import traceback
from collections.abc import Coroutine
from importlib import metadata
from typing import Any, TypeVar

from tocsin import wire
from tocsin.client.credentials import Credentials
from tocsin.clock import boottime
from tocsin.errors import SetupError
from tocsin.privacy import hide_memory
from tocsin.settings import Settings
from tocsin.telemetry import get_logger
from tocsin.worker import proctree
from tocsin.worker.declared import declare
from tocsin.worker.executors import table
from tocsin.worker.executors.python import PythonExecutor
from tocsin.worker.executors.table import Place
from tocsin.worker.guard import Guard
from tocsin.worker.leftovers import Leftovers
from tocsin.worker.link import Link, Refused, UnknownWorker, Unreachable, WrongProtocol
from tocsin.worker.session import LAST_WORDS, Drain, LeaseOver, Session
from tocsin.worker.timing import Lease

log = get_logger("worker")

WRONG_PROTOCOL = 4  # an exit code of its own: to start again helps nobody before somebody has upgraded something
_MOST_BETWEEN_REGISTERS = 5.0
_Result = TypeVar("_Result")


class Agent:
    """A worker, from its first registration to its exit code."""

    def __init__(
        self,
        *,
        url: str,
        key: str,
        ca: str = "",
        module: str | None,
        pool: str,
        slots: int,
        name: str,
        labels: dict[str, str],
        resources: dict[str, float] | None = None,
        editor: Credentials | None = None,
        settings: Settings,
    ) -> None:
        self._link = Link(url, key, ca)
        self._pool, self._slots, self._name, self._labels = pool, slots, name, labels
        self._resources = resources or {}
        self._editor = editor
        self._formerly = ""  # the worker id that this process lost although it kept running
        self._drain = Drain(settings.drain_seconds)
        self._leftovers = Leftovers()
        self._family = proctree.Family()
        self._guard = Guard(self._family, settings.container_engine)
        self._executors = table.executors(Place(self._link.url, slots, module, self._family, settings))
        python = self._executors.get("python")
        self._python = python if isinstance(python, PythonExecutor) else None

    async def run(self) -> int:
        """Work until drained (0), refused or unable to work (1), or by a server of another protocol (4)."""
        self._listen_to_signals()
        proctree.adopt_orphans()
        hide_memory()
        try:
            async with self._link:
                await self._unless_hopeless(self._work())
        except (Refused, SetupError) as exc:
            log.error("the worker cannot go on", why=str(exc))
            return WRONG_PROTOCOL if isinstance(exc, WrongProtocol) else 1
        finally:
            for executor in self._executors.values():
                await executor.close()
            self._guard.close()
        return 0

    async def _work(self) -> None:
        for executor in self._executors.values():
            await executor.open()
        if self._python is not None:
            await self._unless_drained(declare(self._python.jobs, self._editor, self._python.workflows))
        try:
            await self._sessions()
        finally:
            await self._leftovers.end(LAST_WORDS)

    async def _unless_drained(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it, unless we are asked to stop meanwhile."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._drain.wanted.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()

    async def _sessions(self) -> None:
        """One session after the other, each with a worker id of its own."""
        crashes = 0
        while not self._drain.wanted.is_set():
            for executor in self._executors.values():
                await executor.open()
            session = await self._register()
            if session is None:
                return
            try:
                await session.run()
            except (LeaseOver, UnknownWorker) as exc:
                log.warning("this worker was lost; all its runs are killed", worker=session.worker_id, why=str(exc))
                self._formerly = session.worker_id
            except (Refused, SetupError):
                await session.logs.stop()
                raise
            except Exception as exc:
                # A bug of ours that one run triggered. The process continues, because other runs need it. It does not
                # name its old worker id: for the server this worker went down, so the run is set apart if it happens
                # again.
                crashes += 1
                how = "".join(traceback.format_exception(exc))
                log.error("the session failed; all its runs are killed", worker=session.worker_id, how=how)
                self._formerly = ""
            except BaseException:
                await session.logs.stop()
                raise
            else:
                return await session.logs.stop()
            for executor in self._executors.values():
                executor.silence()
                await executor.kill_all()
            self._guard.lease_until(0)
            # What runs were killed with is said by now.
            self._leftovers.take(session.logs)
            if crashes:
                await self._pause(random.uniform(0.5, 1) * min(0.1 * 2**crashes, _MOST_BETWEEN_REGISTERS))

    async def _register(self) -> Session | None:
        """Try until the server answers; None if we are asked to stop meanwhile."""
        body = wire.Register(
            name=self._name,
            pool=self._pool,
            slots=self._slots,
            resources=self._resources,
            labels=self._labels,
            targets=[kind for executor in self._executors.values() for kind in executor.offers()],
            functions=self._python.functions if self._python else [],
            version=_version(),
            formerly=self._formerly,
        )
        failures = 0
        while not self._drain.wanted.is_set():
            sent = boottime()
            try:
                registered = await self._link.register(body)
            except Unreachable as exc:
                failures += 1
                log.warning("the server does not answer", url=self._link.url, why=str(exc))
                await self._pause(random.uniform(0.5, 1) * min(0.1 * 2**failures, _MOST_BETWEEN_REGISTERS))
                continue
            lease = Lease(registered.lease_seconds, sent, self._guard.lease_until)
            log.info("registered", worker=registered.worker_id, pool=self._pool, slots=self._slots)
            room = self._leftovers.room
            return Session(self._link, registered, self._executors, self._slots, self._drain, lease, self._strike, room)
        return None

    def _strike(self) -> None:
        """Kill all that runs here, in one sweep. Proof comes after."""
        proctree.kill_once(self._family.whole)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drain.wanted.wait(), seconds)

    async def _unless_hopeless(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Give up when the module's process cannot be started any more."""
        task = asyncio.ensure_future(work)
        if self._python is None:
            return await task
        await asyncio.wait((task, self._python.hopeless), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            # What was not started goes back; the module may work elsewhere.
            self._drain.ask()
            await task
            raise SetupError(self._python.hopeless.result())
        return task.result()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain.ask)


def _version() -> str:
    try:
        return metadata.version("tocsin")
    except metadata.PackageNotFoundError:
        return "unknown"
