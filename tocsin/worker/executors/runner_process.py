"""One runner process: its calls, its messages about them, and the ends of the calls that it takes down with it.

Every message of the runner is checked against the attempts that it was given. An attempt whose messages cannot be
handled ends alone. A runner that breaks the protocol is killed, and its owner starts another.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import subprocess
import time
from typing import Protocol

import msgspec

from tocsin.errors import SetupError
from tocsin.telemetry import get_logger
from tocsin.wire import Finished, LogLine
from tocsin.worker import proctree
from tocsin.worker.channel import GOOD_FRAME, Channel, FrameTooLarge
from tocsin.worker.executors import STOP_GRACE, Attempt, Sink, Why, kill_tree
from tocsin.worker.frames import (
    ENDED,
    NOT_STARTED,
    Call,
    CallTarget,
    Done,
    Hello,
    Note,
    Orders,
    Output,
    ProtocolViolation,
    Replies,
    RunRef,
    Table,
)
from tocsin.worker.proctree import Family, Tree
from tocsin.worker.targets import NO_RESOURCES

log = get_logger("runner")

_HELLO_WITHIN = 60.0
_CHECK_EVERY = 0.25
_NUMBERS = itertools.count(1)  # numbers of runners; they distinguish the processes that different runners have forked
_KILLED = Why("lost", "its process was killed by the worker")
_IN_DOUBT = Why("lost", "its process broke the protocol with its worker, and was killed")
_BROKEN = "the worker could not handle what the function wrote or noted"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Replies).decode
_NIL = b"\xc0"
_WORTH_TELLING = 1_000_000  # ns of processor time; less is not worth reporting for each of many short calls


async def greet(runner: RunnerProcess) -> Hello:
    """Wait for the hello of a new runner. Raise `SetupError` if it does not come or reports an error."""
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


class Owner(Protocol):
    """The owner of a runner. Its sink receives the ends of the attempts."""

    @property
    def sink(self) -> Sink: ...


class RunnerProcess:
    """One runner process and its attempts."""

    def __init__(self, command: list[str], slots: int, family: Family, owner: Owner, brands: int) -> None:
        loop = asyncio.get_running_loop()
        self._owner, self._family = owner, family
        self._tree = family.tree(f"runner-{next(_NUMBERS)}", brands=brands)
        self._calls = itertools.count()
        self._unkept: dict[int, int] = {}  # by cell: how many checkpoints have not been answered
        self._waiting: dict[int, Done] = {}  # ended calls that are reported when their checkpoints are answered
        self._said_done: set[int] = set()  # cells of runs that have ended and are not reported yet
        self._broken: set[int] = set()  # cells of runs that end as `internal`, whatever they report
        self._brands: dict[int, int] = {}  # by cell
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
        self._channel = Channel(ours, loop, self._on_frame, self._kill_now, self._doubt)
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
        """Return the functions that the runner offers, and its error if there is one."""
        return await asyncio.shield(self._hello)

    def start(self, attempts: list[Attempt]) -> None:
        """Send calls, in one frame unless that would be too large."""
        for attempt in attempts:
            cell = attempt.handle = self._cells.pop()
            self._attempts[cell] = attempt
            self._table.cells[cell] = NOT_STARTED
            self._brands[cell] = self._tree.brands[1 + next(self._calls) % (len(self._tree.brands) - 1)]
        if attempts:
            self._send_calls(attempts)

    def _send_calls(self, attempts: list[Attempt]) -> None:
        frame, half = self._orders(attempts), len(attempts) // 2
        if len(frame) > GOOD_FRAME and half:
            self._send_calls(attempts[:half])
            self._send_calls(attempts[half:])
            return
        try:
            self._channel.send(frame)
        except FrameTooLarge as exc:
            [attempt] = attempts
            self._forget(attempt.handle)
            end = attempt.finished("failed", error_class="start", message=f"it cannot be handed over: {exc}")
            self._owner.sink.ended([(attempt, end)])

    def _orders(self, attempts: list[Attempt]) -> bytes:
        orders = Orders([], [], [])
        seen: dict[int, int] = {}
        for attempt in attempts:
            target, run = attempt.target, attempt.run
            index = seen.get(id(target))
            if index is None:
                index = seen[id(target)] = len(orders.targets)
                orders.targets.append(CallTarget(target.function, target.args, target.kwargs))
            orders.calls.append(
                Call(
                    attempt.handle,
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
                    self._brands[attempt.handle],
                    run.checkpoint,
                    run.secrets,
                    run.parents,
                    run.logical_at,
                    run.sensitive,
                )
            )
        return _encode(orders)

    def stop(self, attempt: Attempt) -> None:
        """Ask the call to stop. `watch` kills the runner if the call does not end within the grace period."""
        if self._attempts.get(attempt.handle) is attempt and not attempt.stopping:
            attempt.stopping = "cancelled"
            self._ask_to_stop(attempt)

    def _ask_to_stop(self, attempt: Attempt) -> None:
        self._stop_by[attempt.handle] = time.monotonic() + STOP_GRACE
        self._channel.send(_encode(Orders(stops=[_ref(attempt)])))

    async def watch(self) -> None:
        """Wait until the runner has ended. Kill it if calls exceed their time-out or stop order by more than the grace
        period."""
        while not self.exited.done():
            if self._killed is _IN_DOUBT or self._overdue():
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
        """Kill the runner and all processes that it started. Return when it has ended and its attempts are accounted
        for."""
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
        """Kill the runner, which closed its end of the channel: no more frames can arrive."""
        proctree.kill_once(self._tree)

    def _doubt(self, exc: Exception) -> None:
        """Stop trusting the runner. It gets no further calls, and another runner replaces it. Calls that it has begun
        are lost; the others are handed back."""
        log.error("the module's process broke the protocol", why=f"{type(exc).__name__}: {exc}")
        self.ready = False
        self._killed = self._killed or _IN_DOUBT
        proctree.kill_once(self._tree)

    def _on_frame(self, frame: bytes) -> None:
        replies = _decode(frame)
        if replies.hello is not None:
            if self._hello.done():
                raise ProtocolViolation("it said hello twice")
            self.ready = not replies.hello.error
            self._hello.set_result(replies.hello)
        for line in replies.output:
            lines: list[LogLine] = [(line.at, line.stream, line.level, line.text)] if line.stream else []
            attempt = self._named(line)
            try:
                self._owner.sink.output(attempt, lines, line.dropped)
            except Exception as exc:
                self._break(attempt, exc)
        for note in replies.notes:
            self._note(note)
        if replies.done:
            self._take_done(replies.done)

    def _named(self, about: Output | Note | Done) -> Attempt:
        """Return the attempt that a message names. Its cell may have belonged to another run, and may soon again."""
        cell = about.cell
        attempt = self._attempts.get(cell)
        if attempt is None or attempt.key != (about.run_id, about.fence) or cell in self._said_done:
            raise ProtocolViolation(f"it spoke of run {about.run_id[:64]!r}, which it does not have in cell {cell}")
        return attempt

    def _break(self, attempt: Attempt, exc: Exception) -> None:
        """End an attempt whose output or note could not be handled. The other attempts continue."""
        log.error("a message of an attempt could not be handled", run=attempt.run.run_id, how=attempt.discreet(exc))
        if attempt.handle not in self._broken:
            self._broken.add(attempt.handle)
            self._ask_to_stop(attempt)

    def _note(self, note: Note) -> None:
        attempt = self._named(note)
        answer = None
        if note.number:
            self._unkept[note.cell] = self._unkept.get(note.cell, 0) + 1
            answer = functools.partial(self._answered, attempt, note.number)
        try:
            self._owner.sink.note(attempt, note, answer)
        except Exception as exc:
            self._break(attempt, exc)
            if answer is not None:
                answer(_BROKEN)

    def _answered(self, attempt: Attempt, number: int, refusal: str) -> None:
        """Report the result of a checkpoint to the function. The end of the call waits for this: after it nothing can
        be kept."""
        cell = attempt.handle
        if self._attempts.get(cell) is not attempt:  # the attempt ended with the runner
            return
        self._channel.send(_encode(Orders(kept=[(_ref(attempt), number, refusal)])))
        self._unkept[cell] -= 1
        if not self._unkept[cell]:
            del self._unkept[cell]
            if cell in self._waiting:
                self._finish([self._waiting.pop(cell)])

    def _take_done(self, ended: list[Done]) -> None:
        for done in ended:
            self._named(done)
            if done.left_children not in (0, self._brands[done.cell]):
                raise ProtocolViolation(f"run {done.run_id} left children of another brand than its own")
            self._said_done.add(done.cell)
        self._finish(ended)

    def _finish(self, ended: list[Done]) -> None:
        if self._unkept:
            for done in ended:
                if done.cell in self._unkept:
                    self._waiting[done.cell] = done
                    self._stop_by.pop(done.cell, None)  # the call has ended in time
            ended = [done for done in ended if done.cell not in self._unkept]
        left = [done for done in ended if done.left_children]
        self._owner.sink.ended([self._end(done) for done in ended if not done.left_children])
        for done in left:
            self._stop_by.pop(done.cell, None)  # the call has ended in time
            task = asyncio.ensure_future(self._clear(done))
            self._clearing.add(task)
            task.add_done_callback(self._clearing.discard)

    async def _clear(self, done: Done) -> None:
        """Kill the processes that a call forked, before its end is reported: the call was stopped or had its own
        process."""
        await kill_tree(self._family, Tree(0, "", range(done.left_children, done.left_children + 1)))
        if done.cell in self._attempts:
            self._owner.sink.ended([self._end(done)])

    def _end(self, done: Done) -> tuple[Attempt, Finished]:
        attempt = self._attempts[done.cell]
        broken = done.cell in self._broken
        self._forget(done.cell)
        attempt.started_ns = done.started_ns
        if broken:
            return attempt, attempt.finished("failed", error_class="internal", message=_BROKEN, ran_ns=done.ran_ns)
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
        if attempt.resources is not NO_RESOURCES:  # no limit applies to one function of a process
            end.usage = (end.usage or {}) | {"enforced": attempt.resources.enforced()}
        return attempt, end

    def _forget(self, cell: int) -> None:
        """Free a cell for another run."""
        del self._attempts[cell], self._brands[cell]
        self._said_done.discard(cell)
        if self._broken:
            self._broken.discard(cell)
        if self._stop_by:
            self._stop_by.pop(cell, None)
        self._cells.append(cell)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._channel.drain()
        self.ready = False
        task = asyncio.ensure_future(self._bury())
        self._clearing.add(task)
        task.add_done_callback(self._clearing.discard)

    async def _bury(self) -> None:
        """Kill the processes that the runner started: they outlive it as our orphans. Its pid stays taken until it is
        reaped."""
        if self._family.has_orphans():
            await kill_tree(self._family, self._tree)
        self._popen.wait()
        self._family.children.discard(self._popen.pid)
        self._account()
        self._table.close()
        self.exited.set_result(None)

    def _account(self) -> None:
        """Report the ends of the attempts that the runner took down with it."""
        ends: list[tuple[Attempt, Finished]] = []
        back: list[Attempt] = []
        waiting, self._waiting = self._waiting, {}
        ends += [self._end(done) for done in waiting.values()]
        for cell, attempt in self._attempts.items():
            started = self._table.cells[cell]
            if started == NOT_STARTED and not attempt.stopping and cell not in self._broken:
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
        if attempt.handle in self._broken:
            return attempt.finished("failed", error_class="internal", message=_BROKEN)
        if started == ENDED:
            return attempt.finished(
                "lost", error_class="lost", message="it ended, but its process died with the result"
            )
        if self._killed is not None:
            return attempt.finished("lost", error_class=self._killed.error_class, message=self._killed.message)
        return attempt.finished(
            "failed", error_class="crashed", message=f"its process died while it was running: {self.how_it_ended()}"
        )


def _ref(attempt: Attempt) -> RunRef:
    return attempt.handle, attempt.run.run_id, attempt.run.fence
