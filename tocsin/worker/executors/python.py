"""Target `python`: functions of the worker's module, called in a runner process of their own.

User code never runs in the agent, so a function that blocks, hogs the interpreter or crashes cannot stop heartbeats.
The runner enforces time-outs and stops by itself; here they are enforced on the runner when it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

import msgspec

from tocsin.errors import SetupError
from tocsin.telemetry import get_logger
from tocsin.wire import Finished, LogLine
from tocsin.worker import proctree
from tocsin.worker.channel import Channel
from tocsin.worker.executors import (
    KILL_PATIENCE,
    LOST,
    STOP_GRACE,
    Answer,
    Attempt,
    Executor,
    Sink,
    Why,
    kill_tree,
)
from tocsin.worker.frames import ENDED, NOT_STARTED, Call, CallTarget, Done, Hello, Note, Orders, Replies, Table
from tocsin.worker.proctree import Family, Tree
from tocsin.worker.targets import NO_RESOURCES

log = get_logger("runner")

_HELLO_WITHIN = 60.0
_CHECK_EVERY = 0.25
_BACK_OFF = (0.0, 0.5, 1.0, 2.0, 5.0)  # after this many starts in a row that failed, the module is hopeless
_HEALTHY_AFTER = 10.0
_BRANDS = 1 << 20  # calls of a runner that can be told apart at a time
_FEW_BRANDS = 1 << 8  # of one that has a call at a time
_NUMBERS = itertools.count(1)  # of runners, by which what one has forked is told from what another has
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
        self.jobs: list[dict[str, Any]] = []  # as the module declares them
        self.workflows: list[dict[str, Any]] = []
        self.hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._command = [sys.executable, "-m", "tocsin.worker.runner", module, url]
        self._family = family
        self._slots = slots
        self._isolated: frozenset[str] = frozenset()
        self._pool = _Pool(self)
        self._runner: _Runner | None = None
        self._waiting: dict[Attempt, None] = {}  # until there is a runner
        self._upkeep: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start the runner, if there is none, and learn what it can call."""
        if self._runner is None:
            self._runner = self.spawn(self._slots, self)
            self._learn(await greet(self._runner))
        if self._upkeep is None or self._upkeep.done():
            self._upkeep = asyncio.ensure_future(self._keep_alive())

    def _learn(self, hello: Hello) -> None:
        self.functions, self.jobs, self._isolated = hello.functions, hello.jobs, frozenset(hello.isolated)
        self.workflows = hello.workflows

    def start(self, attempts: list[Attempt]) -> None:
        if self._isolated:
            for attempt in attempts:
                if attempt.target.function in self._isolated:
                    self._pool.start(attempt)
            attempts = [attempt for attempt in attempts if attempt.target.function not in self._isolated]
        if self._runner is not None and self._runner.ready:
            self._runner.start(attempts)
        else:
            self._waiting.update(dict.fromkeys(attempts))

    def stop(self, attempt: Attempt) -> None:
        if self._pool.stop(attempt):
            return
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
        ends = self._pool.kill_all(why) + ([] if runner is None else [asyncio.ensure_future(runner.kill(why))])
        if ends:
            await asyncio.wait(ends, timeout=KILL_PATIENCE)

    def spawn(self, slots: int, owner: _Owner, brands: int = _BRANDS) -> _Runner:
        """Start a process for so many calls at a time."""
        return _Runner([*self._command, str(slots)], slots, self._family, owner, brands)

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
                self._runner = self.spawn(self._slots, self)
                return self._learn(await greet(self._runner))
            except (SetupError, OSError) as exc:
                if pause is None:
                    self.hopeless.set_result(str(exc))
                    await asyncio.Event().wait()
                log.error("the module's process does not start", why=str(exc))
                await asyncio.sleep(pause or 0)


async def greet(runner: _Runner) -> Hello:
    """Wait for a new runner's first words; raises `SetupError` if it has none, or says that it cannot start."""
    hello = asyncio.ensure_future(runner.hello())
    await asyncio.wait((hello, runner.exited), timeout=_HELLO_WITHIN, return_when=asyncio.FIRST_COMPLETED)
    if not hello.done():
        hello.cancel()
        await runner.kill()
        raise SetupError(f"the module's process did not start: {runner.how_it_ended()}")
    said = hello.result()
    if said.error:
        await runner.kill()
        raise SetupError(said.error)
    return said


class _Owner(Protocol):
    """Whom a runner tells what became of its attempts."""

    @property
    def sink(self) -> Sink: ...


class _Seat:
    """A runner of one call at a time. It is the runner's sink, so that the pool knows when it is free again."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self.runner = pool.executor.spawn(1, self, _FEW_BRANDS)

    @property
    def sink(self) -> Sink:
        return self

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        if told := list(ends):  # nothing has ended while what it forked is cleared away
            self._pool.executor.sink.ended(told)
            self._pool.left(self, [attempt for attempt, _ in told])

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        if told := list(attempts):
            self._pool.executor.sink.handed_back(told)
            self._pool.left(self, told)

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        self._pool.executor.sink.output(attempt, lines, dropped)

    def note(self, attempt: Attempt, note: Note, answer: Answer | None) -> None:
        self._pool.executor.sink.note(attempt, note, answer)


class _Pool:
    """Processes for functions that want one of their own while they run: as many as there are such calls; the next ones
    use them again."""

    def __init__(self, executor: PythonExecutor) -> None:
        self.executor = executor
        self._seats: set[_Seat] = set()
        self._idle: list[_Seat] = []
        self._taken: dict[Attempt, _Seat | None] = {}  # None: its process is being started
        self._tasks: set[asyncio.Future[None]] = set()

    def start(self, attempt: Attempt) -> None:
        """Call it in a process that is free, or in a new one."""
        while self._idle:
            seat = self._idle.pop()
            if seat.runner.ready:
                self._sit(attempt, seat)
                return
        self._taken[attempt] = None
        self._do(self._seat_anew(attempt))

    def stop(self, attempt: Attempt) -> bool:
        """Stop it if it is here."""
        if attempt not in self._taken:
            return False
        seat = self._taken[attempt]
        if seat is not None:
            seat.runner.stop(attempt)
        else:
            del self._taken[attempt]
            self.executor.sink.ended([(attempt, attempt.finished("cancelled"))])
        return True

    def left(self, seat: _Seat, attempts: Iterable[Attempt]) -> None:
        """These have ended: the next one may have the seat, unless there are more than are worth keeping."""
        for attempt in attempts:
            self._taken.pop(attempt, None)
        if len(self._idle) < (os.cpu_count() or 1) and seat.runner.ready:
            self._idle.append(seat)
        else:
            self._do(seat.runner.kill())

    def kill_all(self, why: Why) -> list[asyncio.Future[None]]:
        """Kill every process; what was still to be called goes back."""
        waiting = [attempt for attempt, seat in self._taken.items() if seat is None]
        for task in self._tasks:
            task.cancel()
        seats, self._seats, self._idle = self._seats, set(), []
        for attempt in waiting:
            del self._taken[attempt]
        self.executor.sink.handed_back(waiting)
        return [self._do(seat.runner.kill(why)) for seat in seats]

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sit(self, attempt: Attempt, seat: _Seat) -> None:
        self._taken[attempt] = seat
        seat.runner.start([attempt])

    async def _seat_anew(self, attempt: Attempt) -> None:
        try:
            seat = _Seat(self)
            self._seats.add(seat)
            self._do(self._attend(seat))
            await greet(seat.runner)
        except (SetupError, OSError) as exc:
            if attempt in self._taken:
                del self._taken[attempt]
                end = attempt.finished("failed", error_class="start", message=str(exc))
                self.executor.sink.ended([(attempt, end)])
            return
        if attempt in self._taken:
            self._sit(attempt, seat)
        else:  # stopped meanwhile
            self.left(seat, ())

    async def _attend(self, seat: _Seat) -> None:
        await seat.runner.watch()
        self._seats.discard(seat)


class _Runner:
    """One runner process and the attempts it has in hand."""

    def __init__(self, command: list[str], slots: int, family: Family, owner: _Owner, brands: int) -> None:
        loop = asyncio.get_running_loop()
        self._owner, self._family = owner, family
        self._tree = family.tree(f"runner-{next(_NUMBERS)}", brands=brands)
        self._calls = itertools.count()
        self._unkept: dict[int, int] = {}  # by cell: how many checkpoints have not been answered
        self._waiting: dict[int, Done] = {}  # ended, and to be told when they have
        self._table = Table(slots)
        self._cells: list[int] = list(range(slots))
        self._attempts: dict[int, Attempt] = {}
        self._stop_by: dict[int, float] = {}
        self._killed: Why | None = None
        self._clearing: set[asyncio.Task[None]] = set()
        self._hello: asyncio.Future[Hello] = loop.create_future()
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
        # On the loop's thread on purpose: the child dies with the thread that starts it.
        with proctree.branded(self._tree.brands[0]):
            return subprocess.Popen(
                [*command, str(fd), str(self._table.fd)],
                stdin=subprocess.DEVNULL,
                env={**proctree.without_keys(), proctree.MARK: self._tree.mark},
                pass_fds=(fd, self._table.fd),
                start_new_session=True,
                preexec_fn=proctree.die_with_parent(os.getpid()),
            )

    async def hello(self) -> Hello:
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
                    self._tree.brands[1 + next(self._calls) % (len(self._tree.brands) - 1)],
                    run.checkpoint,
                    run.secrets,
                    run.parents,
                    run.logical_at,
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
            self._hello.set_result(replies.hello)
        for line in replies.output:
            lines: list[LogLine] = [(line.at, line.stream, line.level, line.text)] if line.stream else []
            self._owner.sink.output(self._attempts[line.cell], lines, line.dropped)
        for note in replies.notes:
            self._note(note)
        if replies.done:
            self._finish(replies.done)

    def _note(self, note: Note) -> None:
        answer = None
        if note.number:
            self._unkept[note.cell] = self._unkept.get(note.cell, 0) + 1
            answer = functools.partial(self._answered, note.cell, note.number)
        self._owner.sink.note(self._attempts[note.cell], note, answer)

    def _answered(self, cell: int, number: int, refusal: str) -> None:
        """The function hears what became of its checkpoint. An end waits for that: afterwards nothing could be kept."""
        self._channel.send(_encode(Orders(kept=[(number, refusal)])))
        self._unkept[cell] -= 1
        if not self._unkept[cell]:
            del self._unkept[cell]
            if cell in self._waiting:
                self._finish([self._waiting.pop(cell)])

    def _finish(self, ended: list[Done]) -> None:
        if self._unkept:
            for done in ended:
                if done.cell in self._unkept:
                    self._waiting[done.cell] = done
                    self._stop_by.pop(done.cell, None)  # it has ended in time
            ended = [done for done in ended if done.cell not in self._unkept]
        left = [done for done in ended if done.left_children]
        self._owner.sink.ended([self._end(done) for done in ended if not done.left_children])
        for done in left:
            self._stop_by.pop(done.cell, None)  # it has ended in time
            task = asyncio.ensure_future(self._clear(done))
            self._clearing.add(task)
            task.add_done_callback(self._clearing.discard)

    async def _clear(self, done: Done) -> None:
        """A call was stopped, or had its process for itself: what it forked ends, too, before it is said to have."""
        await kill_tree(self._family, Tree(0, "", range(done.left_children, done.left_children + 1)))
        if done.cell in self._attempts:
            self._owner.sink.ended([self._end(done)])

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
        if done.error_class:
            end.retry_after, end.give_up = done.retry_after, done.give_up
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
        waiting, self._waiting = self._waiting, {}
        ends += [self._end(done) for done in waiting.values()]
        for cell, attempt in self._attempts.items():
            started = self._table.cells[cell]
            if started == NOT_STARTED and not attempt.stopping:
                back.append(attempt)
            else:
                attempt.started_ns = max(started, 0)
                ends.append((attempt, self._verdict(attempt, started)))
        self._attempts.clear()
        self._owner.sink.handed_back(back)
        self._owner.sink.ended(ends)

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
