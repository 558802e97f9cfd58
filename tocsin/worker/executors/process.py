"""Target `process`: a program without a shell, in a session of its own, with a clean environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from tocsin.telemetry import get_logger
from tocsin.wire import Finished, LogLine
from tocsin.worker import proctree
from tocsin.worker.executors import KILL_PATIENCE, LOST, STOP_GRACE, Attempt, Executor, Why, kill_tree
from tocsin.worker.lines import LineSplitter, OutputLimit
from tocsin.worker.proctree import Family, Tree
from tocsin.worker.targets import NO_RESOURCES, ProcessTarget

log = get_logger("worker")

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SSL_CERT_FILE")
_READ = 1 << 16
_LAST_OUTPUT = 1.0  # how long to wait for the end of the output once the whole tree is gone


class ProcessExecutor(Executor):
    """Starts programs and owns their trees."""

    kind = "process"

    def __init__(self, url: str, family: Family) -> None:
        super().__init__()
        self._url, self._family = url, family
        self._base = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._running: dict[Attempt, _Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # A Python function between fork and exec makes a start cost 6 ms of the loop's time; setpriv does it in 1.
        setpriv = shutil.which("setpriv")
        self._prefix = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
        self._die_with_us = None if setpriv else proctree.die_with_parent(os.getpid())

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

    def _start(self, attempt: Attempt) -> None:
        attempt.started_ns = time.monotonic_ns()
        tree = self._family.tree(f"{attempt.run.run_id}:{attempt.run.fence}")
        try:
            popen = self._spawn(attempt, tree)
            process = _Process(self, attempt, popen, tree._replace(root=popen.pid), self._family)
        except (OSError, ValueError, UnicodeError) as exc:
            end = attempt.finished("failed", error_class="start", message=f"{attempt.target.command[0]}: {exc}")
            self.sink.ended([(attempt, end)])
            return
        self._running[attempt] = process
        self._family.children.add(popen.pid)
        proctree.yield_to_us(popen.pid)
        task = asyncio.ensure_future(self._supervise(attempt, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn(self, attempt: Attempt, tree: Tree) -> subprocess.Popen[bytes]:
        target: ProcessTarget = attempt.target
        env = self._environment(attempt, target, tree.mark)
        program = _find(target, env)
        with _stdin(target.stdin) as stdin, proctree.branded(tree.brands[0]):
            # On the loop's thread on purpose: the child dies with the thread that starts it.
            return subprocess.Popen(
                [*self._prefix, program, *target.command[1:]],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd=target.cwd,
                env=env,
                start_new_session=True,
                preexec_fn=self._die_with_us,
            )

    def _environment(self, attempt: Attempt, target: ProcessTarget, mark: str) -> dict[str, str]:
        run = attempt.run
        return {
            **self._base,
            **target.env,
            **run.secrets,
            "TOCSIN_RUN_ID": run.run_id,
            "TOCSIN_JOB_ID": run.job_id,
            "TOCSIN_JOB_NAME": run.job_name or "",
            "TOCSIN_ATTEMPT": str(run.attempt),
            "TOCSIN_FENCE": str(run.fence),
            "TOCSIN_SCHEDULED_FOR": run.scheduled_for,
            "TOCSIN_ARGS": msgspec.json.encode({} if run.args is None else run.args).decode(),
            "TOCSIN_URL": self._url,
            "TOCSIN_RUN_TOKEN": run.token,
            proctree.MARK: mark,
        }

    async def _supervise(self, attempt: Attempt, process: _Process) -> None:
        await process.run(attempt.run.timeout_ms / 1000)
        await process.clear_tree()
        process.reap()
        self._family.children.discard(process.popen.pid)
        await process.drain()
        del self._running[attempt]
        self.sink.ended([(attempt, process.end())])


class _Process:
    """One program: its pipes, its clock, and how it ended."""

    def __init__(
        self, executor: ProcessExecutor, attempt: Attempt, popen: subprocess.Popen[bytes], tree: Tree, family: Family
    ) -> None:
        self.popen = popen
        self._tree, self._family = tree, family
        self.kill = asyncio.Event()
        self.lost: Why | None = None
        self.tree_gone = True
        self._attempt, self._executor = attempt, executor
        self._loop = asyncio.get_running_loop()
        self.limit = OutputLimit()
        self._usage: dict[str, Any] = {}
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
            await self._exited

    async def clear_tree(self) -> None:
        """What a run leaves behind in the background ends with it.

        Its first process has ended but is not reaped yet, so its id still names this tree and no other. Whatever
        else is left of the tree has become, or descends from, an orphan of ours.
        """
        if self._family.has_orphans():
            self.tree_gone = await kill_tree(self._family, self._tree)

    def stop(self, why: str) -> None:
        """Ask the program to end; after the grace the whole tree is killed."""
        if self._attempt.stopping or self._exited.done():
            return
        self._attempt.stopping = "timeout" if why == "timeout" else "cancelled"
        proctree.signal_group(self.popen.pid, signal.SIGTERM)
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
        if self._attempt.resources is not NO_RESOURCES:
            end.usage["enforced"] = self._attempt.resources.enforced()
        return end

    def _outcome(self) -> Finished:
        attempt, code = self._attempt, self.popen.returncode
        survivors = "" if self.tree_gone else "; some of its processes could not be killed"
        if self.lost is not None:
            return attempt.finished("lost", error_class=self.lost.error_class, message=self.lost.message + survivors)
        if attempt.stopping == "timeout":
            text = f"still running after {attempt.run.timeout_ms} ms" + survivors
            return attempt.finished("timeout", error_class="timeout", message=text)
        if attempt.stopping:
            return attempt.finished("cancelled", exit_code=code if code >= 0 else None)
        if code == 0:
            return attempt.finished("succeeded", exit_code=0)
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

    def reap(self) -> None:
        """Let go of the process id, and note what the program used."""
        _, status, used = os.wait4(self.popen.pid, 0)
        self.popen.returncode = os.waitstatus_to_exitcode(status)
        self._usage = {"cpu_ms": round((used.ru_utime + used.ru_stime) * 1000), "max_rss_kb": used.ru_maxrss}

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


def _find(target: ProcessTarget, env: dict[str, str]) -> str:
    """The program's file; names with a slash count from the working directory of the run."""
    name = target.command[0]
    if "/" in name:
        name = os.path.join(target.cwd or "", name)
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        raise FileNotFoundError("there is no such program, or it cannot be executed")
    return os.path.abspath(found)


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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
