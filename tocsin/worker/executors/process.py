"""Target `process`: a program, in a session and a working folder of its own, with a clean environment and limits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Coroutine, Iterator
from typing import IO, Any, NamedTuple

from tocsin.telemetry import get_logger
from tocsin.wire import Finished, LogLine
from tocsin.worker import limits, proctree, sandbox
from tocsin.worker.executors import (
    KILL_PATIENCE,
    LOST,
    MOST_IN_VARIABLE,
    STOP_GRACE,
    Attempt,
    Executor,
    Why,
    environment,
    kill_tree,
)
from tocsin.worker.folders import Folders
from tocsin.worker.limits import Hold, Limits
from tocsin.worker.lines import LineSplitter, OutputLimit
from tocsin.worker.proctree import Family, Tree
from tocsin.worker.sandbox import Sandbox
from tocsin.worker.targets import ProcessTarget

log = get_logger("worker")

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SSL_CERT_FILE")
_MAY_BE_LARGE = ("TOCSIN_ARGS", "TOCSIN_PARENTS")
_READ = 1 << 16
_LAST_OUTPUT = 1.0  # how long to wait for the end of the output once the whole tree is gone


class _Room(NamedTuple):
    """What a run has for itself while it runs: its limits, and its working folder unless its job names one."""

    hold: Hold
    folder: str | None


class ProcessExecutor(Executor):
    """Starts programs and owns their trees."""

    kind = "process"

    def __init__(self, url: str, family: Family) -> None:
        super().__init__()
        self._url, self._family = url, family
        self._limits, self._sandbox, self._folders = Limits(), Sandbox(), Folders()
        self._base = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._running: dict[Attempt, _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # A Python function between fork and exec makes a start cost 6 ms of the loop's time; setpriv does it in 1.
        setpriv = shutil.which("setpriv")
        self._prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        self._die_with_us = None if setpriv else proctree.die_with_parent(os.getpid())

    async def open(self) -> None:
        await self._folders.sweep()

    def offers(self) -> list[str]:
        return ["process", "sandbox"] if self._sandbox.works else ["process"]

    def start(self, attempts: list[Attempt]) -> None:
        for attempt in attempts:
            self._start(attempt)

    def stop(self, attempt: Attempt) -> None:
        process = self._running.get(attempt)
        if process is not None:
            process.stop("cancelled")

    async def kill_all(self, why: Why = LOST) -> None:
        for process in self._running.values():
            process.lost = process.lost or why
            process.kill.set()
        if self._tasks:
            _, left = await asyncio.wait(set(self._tasks), timeout=KILL_PATIENCE)
            if left:
                log.error("some processes cannot be killed", runs=len(left))

    async def close(self) -> None:
        await super().close()
        self._limits.close()
        await asyncio.to_thread(self._folders.close)

    def _start(self, attempt: Attempt) -> None:
        attempt.started_ns = time.monotonic_ns()
        target: ProcessTarget = attempt.target
        room: _Room | None = None
        try:
            room = self._room(attempt)
            popen, tree = self._spawn(attempt, room)
        except (OSError, ValueError, UnicodeError) as exc:
            if room is not None:
                self._vacate_empty(room)
            end = attempt.finished("failed", error_class="start", message=f"{target.words[0]}: {exc}")
            self.sink.ended([(attempt, end)])
            return
        self._family.children.add(popen.pid)
        try:
            process = self._running[attempt] = _Process(self, attempt, popen, tree, self._family, room)
        except OSError as exc:  # no file descriptors left
            self._do(self._abandon(attempt, popen, tree, room, f"{target.words[0]}: {exc}"))
            return
        proctree.yield_to_us(popen.pid)
        limits.settle(popen.pid)
        self._do(self._supervise(attempt, process))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _room(self, attempt: Attempt) -> _Room:
        target: ProcessTarget = attempt.target
        if target.sandbox and (target.cwd is not None or not self._sandbox.works):
            raise OSError("this worker has no sandbox for it")
        hold = self._limits.hold(attempt.resources)
        if target.cwd is not None:
            return _Room(hold, None)
        try:
            return _Room(hold, self._folders.make(self._sandbox.owner if target.sandbox else None))
        except OSError:
            self._limits.release(hold, empty=True)
            raise

    def _vacate_empty(self, room: _Room) -> None:
        """Nothing was started in it."""
        self._limits.release(room.hold, empty=True)
        if room.folder is not None:
            self._folders.drop(room.folder)

    async def _abandon(
        self, attempt: Attempt, popen: subprocess.Popen[bytes], tree: Tree, room: _Room, why: str
    ) -> None:
        """It runs, and cannot be seen through: it ends, with all that it may have started and written by now."""
        for pipe in (popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()
        gone = await kill_tree(self._family, tree)
        if gone:
            popen.wait()
            self._family.children.discard(popen.pid)
        self._limits.release(room.hold, empty=gone)
        if room.folder is not None:
            await self._folders.remove(room.folder)
        why += "" if gone else "; some of its processes could not be killed"
        self.sink.ended([(attempt, attempt.finished("failed", error_class="start", message=why))])

    def _spawn(self, attempt: Attempt, room: _Room) -> tuple[subprocess.Popen[bytes], Tree]:
        target: ProcessTarget = attempt.target
        tree = self._family.tree(f"{attempt.run.run_id}:{attempt.run.fence}")
        env = self._environment(attempt, tree.mark, room)
        around = self._sandbox.around(room.folder) if target.sandbox else []
        command = _command(target, target.cwd or room.folder or "", env)
        with _stdin(target.stdin) as stdin, _large_variables(env) as files, proctree.branded(tree.brands[0]):
            # On the loop's thread on purpose: the child dies with the thread that starts it.
            popen = subprocess.Popen(
                [*room.hold.prefix, *self._prefix, *around, *command],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=target.cwd or room.folder,
                env=env,
                pass_fds=files,
                start_new_session=True,
                preexec_fn=self._die_with_us,
            )
        doors = tuple(room.hold.group.doors) if room.hold.group else ()
        return popen, tree._replace(root=popen.pid, doors=doors)

    def _environment(self, attempt: Attempt, mark: str, room: _Room) -> dict[str, str]:
        target: ProcessTarget = attempt.target
        return {
            **self._base,
            **({"TMPDIR": room.folder} if room.folder else {}),
            **({"HOME": sandbox.HOME, "TMPDIR": sandbox.HOME} if target.sandbox else {}),
            **environment(attempt, self._url),
            proctree.MARK: mark,
        }

    async def _supervise(self, attempt: Attempt, process: _Process) -> None:
        try:
            end = await self._see_through(attempt, process)
        except Exception as exc:  # the slot must come free, whatever is wrong with us
            log.error("a program could not be seen through", run=attempt.run.run_id, how=attempt.discreet(exc))
            message = f"{type(exc).__name__}: {exc}; whether it still runs is not known"
            end = attempt.finished("failed", error_class="worker", message=message)
        del self._running[attempt]
        self.sink.ended([(attempt, end)])

    async def _see_through(self, attempt: Attempt, process: _Process) -> Finished:
        await process.run(attempt.run.timeout_ms / 1000)
        await process.clear_tree()
        process.let_go()
        await process.drain()
        end = process.end()
        self._limits.release(process.room.hold, empty=process.tree_gone)
        if process.room.folder is not None:
            await self._folders.remove(process.room.folder)
        return end


class _Process:
    """One program: its pipes, its clock, and how it ended."""

    def __init__(
        self,
        executor: ProcessExecutor,
        attempt: Attempt,
        popen: subprocess.Popen[bytes],
        tree: Tree,
        family: Family,
        room: _Room,
    ) -> None:
        self.popen, self.room = popen, room
        self._tree, self._family = tree, family
        self.kill = asyncio.Event()
        self.lost: Why | None = None
        self.tree_gone = True
        self._attempt, self._executor = attempt, executor
        self._loop = asyncio.get_running_loop()
        self.limit = OutputLimit()
        self._usage: dict[str, Any] = {}
        self._ooms = 0
        self._exited = self._loop.create_future()
        self._grace: asyncio.TimerHandle | None = None
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        assert popen.stdout is not None and popen.stderr is not None
        self._pipes = {
            popen.stdout: _Pipe(self, popen.stdout, "stdout"),
            popen.stderr: _Pipe(self, popen.stderr, "stderr"),
        }

    async def run(self, timeout: float) -> None:
        """Until the program has ended, by itself or by force."""
        timer = self._loop.call_later(timeout, self.stop, "timeout")
        killed = asyncio.ensure_future(self.kill.wait())
        await asyncio.wait((self._exited, killed), return_when=asyncio.FIRST_COMPLETED)
        timer.cancel()
        killed.cancel()
        if self._grace is not None:
            self._grace.cancel()
        if not self._exited.done():
            self.tree_gone = await kill_tree(self._family, self._tree)
            if self.tree_gone:
                await self._exited

    async def clear_tree(self) -> None:
        """What a run leaves behind in the background ends with it.

        Its first process has ended but is not reaped yet, so its id still names this tree and no other. Whatever
        else is left of the tree has become, or descends from, an orphan of ours.
        """
        if self._exited.done() and self._family.has_orphans():
            self.tree_gone = await kill_tree(self._family, self._tree)

    def stop(self, why: str) -> None:
        """Ask the program to end; after the grace the whole tree is killed."""
        if self._attempt.stopping or self._exited.done():
            return
        self._attempt.stopping = "timeout" if why == "timeout" else "cancelled"
        # In a sandbox, those that keep it up must live for the program to be able to end by itself.
        ask = proctree.signal_within if self._attempt.target.sandbox else proctree.signal_group
        ask(self.popen.pid, signal.SIGTERM)
        self._grace = self._loop.call_later(STOP_GRACE, self.kill.set)

    async def drain(self) -> None:
        """Read what the pipes still hold. Nobody can write any more, so this is short."""
        open_pipes = [pipe.closed for pipe in self._pipes.values() if not pipe.closed.done()]
        if open_pipes:
            await asyncio.wait(open_pipes, timeout=_LAST_OUTPUT)
        for pipe in self._pipes.values():
            pipe.close()

    def end(self) -> Finished:
        """How the attempt ended."""
        end = self._outcome()
        end.usage = self._usage
        return end

    def _outcome(self) -> Finished:
        attempt, code = self._attempt, self.popen.returncode
        left = "" if self.tree_gone else "some of its processes could not be killed"
        survivors = left and f"; {left}"
        if self.lost is not None:
            return attempt.finished("lost", error_class=self.lost.error_class, message=self.lost.message + survivors)
        if attempt.stopping == "timeout":
            text = f"still running after {attempt.run.timeout_ms} ms" + survivors
            return attempt.finished("timeout", error_class="timeout", message=text)
        if attempt.stopping:
            by_itself = code if code is not None and code >= 0 else None
            return attempt.finished("cancelled", exit_code=by_itself, error_class=left and "worker", message=left)
        if code == 0:
            return attempt.finished("succeeded", exit_code=0)
        if self._ooms:
            text = f"more memory than the {attempt.resources.memory_mb} MB that it was given"
            return attempt.finished("failed", exit_code=code if code > 0 else None, error_class="oom", message=text)
        if code > 0:
            return attempt.finished("failed", exit_code=code, error_class="exit", message=f"exit code {code}")
        return attempt.finished("failed", error_class="signal", message=f"killed by {_signal_name(-code)}")

    def take(self, stream: str, lines: list[str]) -> None:
        kept, dropped = self.limit.take(lines)
        if kept or dropped:
            at = time.time()
            shaped: list[LogLine] = [(at, stream, "info", line) for line in kept]
            self._executor.sink.output(self._attempt, shaped, dropped)

    def drop(self, lines: int) -> None:
        """Count lines that nobody will read."""
        if lines:
            self._executor.sink.output(self._attempt, [], lines)

    def let_go(self) -> None:
        """Note what the program used. One that has another user's rights by now, and cannot be killed, may go on: its
        id stays taken until it ends."""
        if self._exited.done():
            self._reap()
        else:
            self._exited.add_done_callback(lambda _: self._reap())

    def _reap(self) -> None:
        self._family.children.discard(self.popen.pid)
        _, status, used = os.wait4(self.popen.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        # A sandbox tells of a signal as shells do.
        self.popen.returncode = 128 - code if self._attempt.target.sandbox and code > 128 else code
        hold = self.room.hold
        if hold.group is not None and self._attempt.resources.memory_mb:
            self._ooms = hold.group.ooms()
        cpu_ms = round((used.ru_utime + used.ru_stime) * 1000)
        self._usage = {"cpu_ms": cpu_ms, "max_rss_kb": used.ru_maxrss, "enforced": hold.enforced}

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited.set_result(None)


class _Pipe:
    """Reads one stream as it comes, so that the program never waits for us."""

    def __init__(self, process: _Process, file: IO[bytes], stream: str) -> None:
        self._process, self._file, self._stream = process, file, stream
        self._splitter = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self.closed = self._loop.create_future()
        self._fd: int = file.fileno()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, _READ)
        except BlockingIOError:
            return
        if data and self._process.limit.reached:
            self._process.drop(data.count(b"\n"))
        elif data:
            self._process.take(self._stream, self._splitter.feed(data))
        else:
            self.close()

    def close(self) -> None:
        if not self.closed.done():
            self._process.take(self._stream, self._splitter.end())
            self.closed.set_result(None)
            self._loop.remove_reader(self._fd)
            self._file.close()


def _command(target: ProcessTarget, cwd: str, env: dict[str, str]) -> list[str]:
    first, *others = target.words
    if target.shell:
        return ["/bin/sh", "-c", first, "sh", *others]
    return [_find(first, cwd, env), *others]


def _find(name: str, cwd: str, env: dict[str, str]) -> str:
    """The program's file; names with a slash count from the working folder of the run."""
    folders = [cwd] if "/" in name else env.get("PATH", os.defpath).split(os.pathsep)
    for folder in folders:
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return os.path.abspath(path)
    raise FileNotFoundError("there is no such program, or it cannot be executed")


@contextlib.contextmanager
def _stdin(text: str | None) -> Iterator[int | IO[bytes]]:
    """A file with the text: unlike a pipe, it never makes us wait for the program to read."""
    if text is None:
        yield subprocess.DEVNULL
        return
    with os.fdopen(os.memfd_create("tocsin-stdin"), "w+b") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        yield file


@contextlib.contextmanager
def _large_variables(env: dict[str, str]) -> Iterator[tuple[int, ...]]:
    """What no variable can hold stands in a file, which is gone with its last reader; which to pass on."""
    with contextlib.ExitStack() as open_files:
        passed = []
        for name in _MAY_BE_LARGE:
            text = env.get(name, "").encode()
            if len(text) > MOST_IN_VARIABLE:
                file = open_files.enter_context(os.fdopen(os.memfd_create(name.lower()), "w+b"))
                file.write(text)
                file.flush()
                env |= {name: "", f"{name}_FILE": f"/proc/self/fd/{file.fileno()}"}
                passed.append(file.fileno())
        yield tuple(passed)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
