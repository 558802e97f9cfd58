"""Target `python`: functions of the worker's module, called in a runner process of their own.

User code never runs in the agent, so a function that blocks, hogs the interpreter or crashes cannot stop heartbeats.
The runner enforces time-outs and stops by itself; here they are enforced on the runner when it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time

import msgspec

from tocsin.errors import SetupError
from tocsin.telemetry import get_logger
from tocsin.wire import Finished, LogLine
from tocsin.worker import proctree
from tocsin.worker.channel import Channel
from tocsin.worker.executors import KILL_PATIENCE, LOST, STOP_GRACE, Attempt, Executor, Why, kill_tree
from tocsin.worker.frames import ENDED, NOT_STARTED, Call, CallTarget, Done, Orders, Replies, Table
from tocsin.worker.proctree import Family, Tree
from tocsin.worker.targets import NO_RESOURCES

log = get_logger("runner")

_HELLO_WITHIN = 60.0
_CHECK_EVERY = 0.25
_BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0)  # after this many starts in a row that failed, the module is hopeless
_HEALTHY_AFTER = 10.0
_BRANDS = 1 << 20  # calls of a runner that can be told apart at a time
_KILLED = Why("lost", "its process was killed by the worker")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Replies).decode
_NIL = b"\xc0"
_WORTH_TELLING = 1_000_000  # ns of a processor; less is not worth a word for each of many short calls


class PythonExecutor(Executor):
    """Keeps a runner alive and calls functions in it."""

    kind = "python"
    head_start = 0.03  # to write and read a frame of some thousand calls

    def __init__(self, module: str, slots: int, url: str, family: Family) -> None:
        super().__init__()
        self.functions: list[str] = []
        self.hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._command = [sys.executable, "-m", "tocsin.worker.runner", module, url, str(slots)]
        self._family = family
        self._slots = slots
        self._runner: _Runner | None = None
        self._waiting: dict[Attempt, None] = {}  # until there is a runner
        self._upkeep: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the runner, if there is none, and learn what it can call."""
        if self._runner is None:
            self._runner = self._spawn()
            await self._greet(self._runner)
        if self._upkeep is None or self._upkeep.done():
            self._upkeep = asyncio.ensure_future(self._keep_alive())

    def start(self, attempts: list[Attempt]) -> None:
        if self._runner is not None and self._runner.ready:
            self._runner.start(attempts)
        else:
            self._waiting.update(dict.fromkeys(attempts))

    def stop(self, attempt: Attempt) -> None:
        if attempt in self._waiting:
            del self._waiting[attempt]
            self.sink.ended([(attempt, attempt.finished("cancelled"))])
        elif self._runner is not None:
            self._runner.stop(attempt)

    async def kill_all(self, why: Why = LOST) -> None:
        if self._upkeep is not None:
            self._upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep
        waiting, self._waiting = self._waiting, {}
        self.sink.handed_back(waiting)
        runner, self._runner = self._runner, None
        if runner is not None:
            await asyncio.wait((asyncio.ensure_future(runner.kill(why)),), timeout=KILL_PATIENCE)

    def _spawn(self) -> _Runner:
        return _Runner(self._command, self._slots, self._family, self)

    async def _greet(self, runner: _Runner) -> None:
        hello = asyncio.ensure_future(runner.hello())
        await asyncio.wait((hello, runner.exited), timeout=_HELLO_WITHIN, return_when=asyncio.FIRST_COMPLETED)
        if not hello.done():
            hello.cancel()
            await runner.kill()
            raise SetupError(f"the module's process did not start: {runner.how_it_ended()}")
        functions, error = hello.result()
        if error:
            await runner.kill()
            raise SetupError(error)
        self.functions = functions

    async def _keep_alive(self) -> None:
        """Watch the runner; when it is gone, start another, later and later if it keeps dying young."""
        young_deaths = 0
        while True:
            assert self._runner is not None
            born = time.monotonic()
            await self._runner.watch()
            young_deaths = 0 if time.monotonic() - born > _HEALTHY_AFTER else young_deaths + 1
            log.warning("the module's process ended", how=self._runner.how_it_ended())
            await asyncio.sleep(_BACK_OFF[min(young_deaths, len(_BACK_OFF)) - 1] if young_deaths else 0)
            await self._restart()
            waiting, self._waiting = self._waiting, {}
            self._runner.start(list(waiting))

    async def _restart(self) -> None:
        for pause in (*_BACK_OFF, None):
            try:
                self._runner = self._spawn()
                return await self._greet(self._runner)
            except (SetupError, OSError) as exc:
                if pause is None:
                    self.hopeless.set_result(str(exc))
                    await asyncio.Event().wait()
                log.error("the module's process does not start", why=str(exc))
                await asyncio.sleep(pause or 0)


class _Runner:
    """One runner process and the attempts it has in hand."""

    def __init__(self, command: list[str], slots: int, family: Family, executor: PythonExecutor) -> None:
        loop = asyncio.get_running_loop()
        self._executor, self._family = executor, family
        self._tree = family.tree("runner", brands=_BRANDS)
        self._calls = itertools.count()
        self._table = Table(slots)
        self._cells: list[int] = list(range(slots))
        self._attempts: dict[int, Attempt] = {}
        self._stop_by: dict[int, float] = {}
        self._killed: Why | None = None
        self._clearing: set[asyncio.Task[None]] = set()
        self._hello: asyncio.Future[tuple[list[str], str]] = loop.create_future()
        self.ready = False
        self.exited: asyncio.Future[None] = loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            self._popen = self._start_process(command, theirs.fileno())
        self._tree = self._tree._replace(root=self._popen.pid)
        family.children.add(self._popen.pid)
        proctree.yield_to_us(self._popen.pid)
        self._channel = Channel(ours, loop, self._on_frame, self._kill_now)
        self._pidfd = os.pidfd_open(self._popen.pid)
        loop.add_reader(self._pidfd, self._on_exit)

    def _start_process(self, command: list[str], fd: int) -> subprocess.Popen[bytes]:
        hidden = ("TOCSIN_KEY", "TOCSIN_WORKER_KEY")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        # On the loop's thread on purpose: the child dies with the thread that starts it.
        with proctree.branded(self._tree.brands[0]):
            return subprocess.Popen(
                [*command, str(fd), str(self._table.fd)],
                stdin=subprocess.DEVNULL,
                env={**env, proctree.MARK: self._tree.mark},
                pass_fds=(fd, self._table.fd),
                start_new_session=True,
                preexec_fn=proctree.die_with_parent(os.getpid()),
            )

    async def hello(self) -> tuple[list[str], str]:
        """The functions it offers, and what is wrong if anything is."""
        return await asyncio.shield(self._hello)

    def start(self, attempts: list[Attempt]) -> None:
        """Send calls, in one frame."""
        if not attempts:
            return
        orders = Orders([], [], [])
        seen: dict[int, int] = {}
        for attempt in attempts:
            target, run = attempt.target, attempt.run
            index = seen.get(id(target))
            if index is None:
                index = seen[id(target)] = len(orders.targets)
                orders.targets.append(CallTarget(target.function, target.args, target.kwargs))
            cell = attempt.handle = self._cells.pop()
            self._attempts[cell] = attempt
            self._table.cells[cell] = NOT_STARTED
            orders.calls.append(
                Call(
                    cell,
                    index,
                    run.run_id,
                    run.attempt,
                    run.fence,
                    run.job_id,
                    run.job_name,
                    run.scheduled_for,
                    run.args,
                    run.token,
                    run.timeout_ms,
                    attempt.start_ns,
                    self._tree.brands[1 + next(self._calls) % (_BRANDS - 1)],
                )
            )
        self._channel.send(_encode(orders))

    def stop(self, attempt: Attempt) -> None:
        """Ask; `watch` kills the runner if the call does not end within the grace."""
        if self._attempts.get(attempt.handle) is attempt and not attempt.stopping:
            attempt.stopping = "cancelled"
            self._stop_by[attempt.handle] = time.monotonic() + STOP_GRACE
            self._channel.send(_encode(Orders(stops=[attempt.handle])))

    async def watch(self) -> None:
        """Until the runner has ended; kills it if calls outlive their time-out or stop order by the grace."""
        while not self.exited.done():
            if self._overdue():
                await self.kill()
            await asyncio.wait((self.exited,), timeout=_CHECK_EVERY)

    def _overdue(self) -> bool:
        now, cells = time.monotonic(), self._table.cells
        late = any(now > by for by in self._stop_by.values())
        for cell, attempt in self._attempts.items():
            started = cells[cell]
            if started > 0 and now > started / 1e9 + attempt.run.timeout_ms / 1e3 + STOP_GRACE:
                attempt.stopping = attempt.stopping or "timeout"
                late = True
        return late

    async def kill(self, why: Why = _KILLED) -> None:
        """Kill it and what it started; returns when it has ended and its attempts are accounted for."""
        self._killed = self._killed or why
        if not self.exited.done():
            await kill_tree(self._family, self._tree)
            await self.exited

    def how_it_ended(self) -> str:
        code = self._popen.returncode
        if code is None:
            return "it did not say hello in time"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def _kill_now(self) -> None:
        """It closed its end: nothing more can come of it."""
        proctree.kill_once(self._tree)

    def _on_frame(self, frame: bytes) -> None:
        replies = _decode(frame)
        if replies.hello is not None:
            self.ready = not replies.hello.error
            self._hello.set_result((replies.hello.functions, replies.hello.error))
        for line in replies.output:
            lines: list[LogLine] = [(line.at, line.stream, line.level, line.text)] if line.stream else []
            self._executor.sink.output(self._attempts[line.cell], lines, line.dropped)
        if replies.done:
            left = [done for done in replies.done if done.left_children]
            self._executor.sink.ended([self._end(done) for done in replies.done if not done.left_children])
            for done in left:
                self._stop_by.pop(done.cell, None)  # it has ended in time
                task = asyncio.ensure_future(self._clear(done))
                self._clearing.add(task)
                task.add_done_callback(self._clearing.discard)

    async def _clear(self, done: Done) -> None:
        """A call was stopped: what it forked ends, too, before it is said to have."""
        await kill_tree(self._family, Tree(0, "", range(done.left_children, done.left_children + 1)))
        if done.cell in self._attempts:
            self._executor.sink.ended([self._end(done)])

    def _end(self, done: Done) -> tuple[Attempt, Finished]:
        cell = done.cell
        attempt = self._attempts.pop(cell)
        self._cells.append(cell)
        if self._stop_by:
            self._stop_by.pop(cell, None)
        attempt.started_ns = done.started_ns
        end = attempt.finished(
            done.outcome,
            error_class=done.error_class,
            message=done.message,
            ran_ns=done.ran_ns,
            result=None if bytes(done.result) == _NIL else done.result,
        )
        if done.cpu_ns >= _WORTH_TELLING:
            end.usage = {"cpu_ms": done.cpu_ns // 1_000_000}
        if attempt.resources is not NO_RESOURCES:  # nothing holds one function of a process to a limit
            end.usage = (end.usage or {}) | {"enforced": attempt.resources.enforced()}
        return attempt, end

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._channel.drain()
        self.ready = False
        task = asyncio.ensure_future(self._bury())
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _bury(self) -> None:
        """What it had started outlives it as our orphans; its own id stays taken until it is reaped."""
        if self._family.has_orphans():
            await kill_tree(self._family, self._tree)
        self._popen.wait()
        self._family.children.discard(self._popen.pid)
        self._account()
        self._table.close()
        self.exited.set_result(None)

    def _account(self) -> None:
        """Say what became of the attempts that the runner took with it."""
        ends: list[tuple[Attempt, Finished]] = []
        back: list[Attempt] = []
        for cell, attempt in self._attempts.items():
            started = self._table.cells[cell]
            if started == NOT_STARTED and not attempt.stopping:
                back.append(attempt)
            else:
                attempt.started_ns = max(started, 0)
                ends.append((attempt, self._verdict(attempt, started)))
        self._attempts.clear()
        self._executor.sink.handed_back(back)
        self._executor.sink.ended(ends)

    def _verdict(self, attempt: Attempt, started: int) -> Finished:
        if attempt.stopping == "timeout":
            text = f"still running {STOP_GRACE:.0f} s after its time-out; its process was killed"
            return attempt.finished("timeout", error_class="timeout", message=text)
        if attempt.stopping:
            return attempt.finished("cancelled")
        if started == ENDED:
            return attempt.finished(
                "lost", error_class="lost", message="it ended, but its process died with the result"
            )
        if self._killed is not None:
            return attempt.finished("lost", error_class=self._killed.error_class, message=self._killed.message)
        return attempt.finished(
            "failed", error_class="crashed", message=f"its process died while it was running: {self.how_it_ended()}"
        )
