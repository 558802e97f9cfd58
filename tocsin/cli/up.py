"""`tocsin up`: one terminal, all of Tocsin. The supervisor of PostgreSQL, the server and the workers.

It stays small: what needs the driver or the server's modules happens in processes of its own. Nothing outlives it:
the kernel ends the children of a supervisor that is killed.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import random
import select
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tocsin.cli.liveness import Liveness, answers, connect
from tocsin.client.credentials import trust
from tocsin.errors import SetupError
from tocsin.privacy import hide_memory
from tocsin.settings import Settings, default_home
from tocsin.store.embedded import Embedded, die_with_parent
from tocsin.store.home import HomeLock, database_account, prepare_home, write_private
from tocsin.store.vault import ensure_key_file

_STOP_SECONDS = 10.0
_BACKOFF_SECONDS = (1.0, 30.0)
_STEADY_SECONDS = 60.0  # who lived this long is forgiven earlier failures
_WAIT_FOR_PORT_SECONDS = 10.0
_ABORT_SECONDS = 2.0  # for a silent server to write its stacks

_ENDING_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup, and to stay so
    _ENDING_SIGNALS.append(signal.SIGHUP)

Child = subprocess.Popen[bytes]


def up(settings: Settings, *, workers: int = 1, slots: int | None = None, module: str | None = None) -> int:
    """Run everything on this machine until Ctrl-C or SIGTERM; answers the exit code."""
    settings.refuse_open_doors()
    for file in filter(None, (settings.tls_cert, settings.tls_key)):
        if not os.access(file, os.R_OK):  # before a database is made for nothing
            raise SetupError(f"the file {file}, for TLS, cannot be read")
    hide_memory()
    needs_database = not settings.database_url
    home = prepare_home(settings.home, database_account() if needs_database else None)
    settings = replace(settings, home=home)
    lock = HomeLock(home)
    lock.acquire()
    tree = _Tree(Embedded(home, lock=lock, say=_say) if needs_database else None)
    with _signals_restored():
        try:
            with _interruptible():
                _require_free_port(settings, patient=lock.left_behind)
                _start(tree, settings, _worker_commands(workers, slots, module))
                tree.watch()
        except KeyboardInterrupt:
            _say("Stopping …")
        finally:
            clean = _stop(tree)
            lock.release()
    return 0 if clean else 130


def _start(tree: _Tree, settings: Settings, worker_commands: Sequence[list[str]]) -> None:
    url, ca = own_url(settings), os.environ.get("TOCSIN_CA", "")
    if tree.database is not None:
        settings = replace(settings, database_url=tree.database.start())
        tree.watch_database()
    if not settings.master_key:
        ensure_key_file(settings.home)
    credentials = _bootstrap(settings, url, ca)
    server = tree.add("server", _tocsin("server"), server_environment(settings, os.environ), _liveness(settings))
    _wait_until_ready(server.process, settings)
    if settings.tls_cert:
        _require_trust(url, ca)
    environment = worker_environment(settings, os.environ, url, credentials["worker_key"])
    for number, command in enumerate(worker_commands, start=1):
        name = "worker" if len(worker_commands) == 1 else f"worker {number}"
        tree.add(name, command, environment)
    _greet(settings.home, url)


def _say(line: str) -> None:
    print(line, flush=True)


# ── before anything starts ───────────────────────────────────────────────────────────────────────────────────────────


def local_url(settings: Settings) -> str:
    """How to reach a server on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(settings.host, settings.host)
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://[{host}]:{settings.port}" if ":" in host else f"{scheme}://{host}:{settings.port}"


def own_url(settings: Settings) -> str:
    """How workers and commands on this machine reach the server: with TLS by the name that the certificate has."""
    return settings.public_url if settings.tls_cert and settings.public_url else local_url(settings)


def _require_free_port(settings: Settings, *, patient: bool) -> None:
    """`patient`: the last supervisor was killed, so its server may still be on its way out."""
    deadline = time.monotonic() + (_WAIT_FOR_PORT_SECONDS if patient else 0.0)
    while (problem := _port_problem(settings.host, settings.port)) is not None:
        if problem.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
            raise SetupError(_explain_port(settings, problem))
        time.sleep(0.05)


def _port_problem(host: str, port: int) -> OSError | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error
    return None


def _explain_port(settings: Settings, problem: OSError) -> str:
    where = f"port {settings.port} of {settings.host}"
    if problem.errno == errno.EADDRINUSE:
        return f"{where} is already in use by another program. Stop it, or choose another: tocsin up --port NUMBER."
    return f"{where} cannot be listened on: {problem.strerror}. Choose another with --host and --port."


# ── credentials ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _bootstrap(settings: Settings, url: str, ca: str) -> dict[str, str]:
    """Migrate the database and make sure of our keys, which stay the same for as long as they are valid."""
    known = read_credentials(settings.credentials_file)
    found = _in_a_fork(lambda: _prepare_database(settings, known))
    stored = {"url": url, "key": found["key"], "worker_key": found["worker_key"]} | ({"ca": ca} if ca else {})
    if stored != known:
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in stored.items())
        write_private(settings.credentials_file, f"# Written by `tocsin up`; read by the tocsin command.\n{text}")
    return stored


def _prepare_database(settings: Settings, known: dict[str, str]) -> dict[str, str]:
    from tocsin.node.assemble import bootstrap

    return bootstrap(settings, known)


def read_credentials(path: Path) -> dict[str, str]:
    """What an earlier start left; nothing if it left nothing readable, for keys can be made again."""
    try:
        stored = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name in ("url", "key", "worker_key", "ca") if isinstance(value := stored.get(name), str)}


def _in_a_fork(task: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Do it in a child, so that the modules it loads do not stay in the supervisor's memory for ever."""
    reader, writer = os.pipe()
    prepare = die_with_parent(signal.SIGKILL)
    child = os.fork()
    if child == 0:
        if prepare is not None:
            prepare()
        _answer(task, writer)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            answer = json.loads(pipe.read() or b"null")
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.waitpid(child, 0)
    if answer is None:
        raise SetupError("the database could not be prepared; the lines above say why")
    if "error" in answer:
        raise SetupError(answer["error"])
    found: dict[str, str] = answer["done"]
    return found


def _answer(task: Callable[[], dict[str, str]], writer: int) -> NoReturn:
    code = 1
    try:
        try:
            answer: dict[str, Any] = {"done": task()}
        except SetupError as error:
            answer = {"error": str(error)}
        with open(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# ── the children ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _tocsin(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tocsin", *arguments]


def _worker_commands(workers: int, slots: int | None, module: str | None) -> list[list[str]]:
    options = [] if slots is None else ["--slots", str(slots)]
    modules = [] if module is None else ["--", module]
    if workers > 1:  # each offers its part of the machine, for together they have no more than that
        options += _parts_of_machine(workers)
    names = [[]] if workers == 1 else [["--name", f"{socket.gethostname()}-{n}"] for n in range(1, workers + 1)]
    return [_tocsin("worker", *options, *name, *modules) for name in names]


def _parts_of_machine(workers: int) -> list[str]:
    from tocsin.worker import machine

    parts = {name: amount / workers for name, amount in machine.resources().items()}
    sizes = ("--memory", f"{int(parts['memory_mb'])}m", "--disk", f"{int(parts['disk_mb'])}m")
    return ["--cpu", f"{parts['cpu']:.3f}", *sizes, "--gpus", str(int(parts["gpus"]))]


def server_environment(settings: Settings, outer: Mapping[str, str]) -> dict[str, str]:
    """The settings as the server reads them, whether they came from the environment or from options."""
    walled_in = {"DATABASE_URL": settings.database_url}
    if settings.master_key:
        walled_in["TOCSIN_MASTER_KEY"] = settings.master_key
    return _common_environment(settings, outer) | walled_in


def worker_environment(settings: Settings, outer: Mapping[str, str], url: str, key: str) -> dict[str, str]:
    """The same without the database and the master key: a worker lives outside the wall, even here."""
    trusted = {"TOCSIN_CA": outer["TOCSIN_CA"]} if outer.get("TOCSIN_CA") else {}
    return _common_environment(settings, outer) | trusted | {"TOCSIN_URL": url, "TOCSIN_WORKER_KEY": key}


def _common_environment(settings: Settings, outer: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in outer.items() if not k.startswith("TOCSIN_") and k != "DATABASE_URL"}
    defaults = Settings()
    chosen = {
        f"TOCSIN_{field.name.upper()}": _as_text(getattr(settings, field.name))
        for field in fields(Settings)
        if field.name in ("home", "host", "port") or getattr(settings, field.name) != getattr(defaults, field.name)
    }
    for walled_in in ("TOCSIN_DATABASE_URL", "TOCSIN_MASTER_KEY"):
        chosen.pop(walled_in, None)
    if "TOCSIN_LOG_LEVEL" not in outer and settings.log_level == defaults.log_level:
        chosen["TOCSIN_LOG_LEVEL"] = "warning"
    return inherited | {"TOCSIN_LOG_LEVEL": settings.log_level} | chosen


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _wait_until_ready(server: Child, settings: Settings) -> None:
    begun = time.monotonic()
    next_word = begun + 5
    while not _is_ready(settings):
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = server.wait(timeout=0.03)
            raise SetupError(f"the server stopped at its start ({_ending(code)}); the lines above say why")
        if time.monotonic() > next_word:
            _say(f"Waiting for the server ({time.monotonic() - begun:.0f} s) …")
            next_word += 5


def _is_ready(settings: Settings) -> bool:
    """Return whether our own child answers that it is ready."""
    connection = connect(_address(settings), bool(settings.tls_cert), 2)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _address(settings: Settings) -> str:
    return local_url(settings).partition("://")[2]


def _liveness(settings: Settings) -> Liveness | None:
    if not settings.unresponsive_seconds:
        return None
    address, tls = _address(settings), bool(settings.tls_cert)
    return Liveness(lambda timeout: answers(address, tls, timeout), settings.unresponsive_seconds)


def _require_trust(url: str, ca: str) -> None:
    """Find out now, not from each worker and command, that they will not believe the certificate."""
    connection = http.client.HTTPSConnection(url.partition("://")[2], timeout=10, context=trust(url, ca))
    try:
        connection.connect()
    except ssl.SSLCertVerificationError as error:
        raise SetupError(
            f"{url} cannot be trusted: {error.verify_message}. TOCSIN_PUBLIC_URL says by which name of its certificate "
            "the server is reached, TOCSIN_CA which file has the authority."
        ) from None
    except OSError as error:
        raise SetupError(f"{url} cannot be reached: {error}; TOCSIN_PUBLIC_URL says how it can") from None
    finally:
        connection.close()


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _greet(home: Path, url: str) -> None:
    command = _how_to_call()
    if home != default_home().resolve():
        command = f"TOCSIN_HOME={shlex.quote(str(home))} {command}"
    _say(f"  API      {url}")
    _say(f"  Home     {home}")
    _say(f'  Try      {command} job create --name hello --cron "* * * * *" -- echo hi')
    _say(f"           {command} job list")
    _say("Tocsin is ready")


def _how_to_call() -> str:
    if shutil.which("tocsin"):
        return "tocsin"
    installed = Path(sys.executable).with_name("tocsin")
    if not installed.exists():
        return f"{shlex.quote(sys.executable)} -m tocsin"
    with contextlib.suppress(ValueError):
        installed = installed.relative_to(Path.cwd())
    return shlex.quote(str(installed))


# ── the tree ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Unit:
    """A process that is started again, later each time, whenever it ends."""

    name: str
    start: Callable[[], Child]
    process: Child
    started_at: float
    failures: int = 0
    restart_at: float | None = None
    liveness: Liveness | None = None

    @property
    def due_at(self) -> float | None:
        """Return when to check at the latest. None: when a child ends."""
        if self.restart_at is not None:
            return self.restart_at
        return None if self.liveness is None else self.liveness.next_at

    def check(self, now: float) -> None:
        """Handle an end or a long silence, or restart when it is time."""
        if self.restart_at is None:
            code = self.process.poll()
            if code is not None:
                self._note_failure(now, f"ended ({_ending(code)})")
            elif self.liveness is not None and (silent := self.liveness.gave_up(self.process.pid)) is not None:
                self._end_silent(silent)
        elif now >= self.restart_at:
            try:
                self.process, self.started_at, self.restart_at = self.start(), time.monotonic(), None
            except (SetupError, OSError) as error:
                self._note_failure(time.monotonic(), f"did not start: {error}")

    def _end_silent(self, seconds: float) -> None:
        """End a process that runs and does not answer. SIGABRT makes it write its stacks first, if it still can."""
        pid = self.process.pid
        _say(f"The {self.name} (process {pid}) has not answered for {seconds:.0f} s and is ended")
        self.process.send_signal(signal.SIGABRT)
        try:
            self.process.wait(_ABORT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._note_failure(time.monotonic(), f"did not answer (process {pid})")

    def _note_failure(self, now: float, what: str) -> None:
        self.failures = 1 if now - self.started_at > _STEADY_SECONDS else self.failures + 1
        delay = backoff(self.failures, random.random())
        self.restart_at = now + delay
        _say(f"The {self.name} {what}; starting it again in {delay:.1f} s")


def backoff(failures: int, chance: float) -> float:
    """Seconds before the next start: doubling from 1 to 30, less up to a quarter so that children spread."""
    shortest, longest = _BACKOFF_SECONDS
    return max(shortest, min(longest, shortest * 2.0 ** min(failures - 1, 10)) * (1 - chance / 4))


class _Tree:
    """All children, in the order of their start."""

    def __init__(self, database: Embedded | None) -> None:
        self.database = database
        self._units: list[_Unit] = []

    def watch_database(self) -> None:
        """From now on PostgreSQL is started again should it end."""
        database = self.database
        assert database is not None

        def start() -> Child:
            database.start()
            return database.process

        self._units.append(_Unit("PostgreSQL", start, database.process, time.monotonic()))

    def add(
        self, name: str, command: list[str], environment: dict[str, str], liveness: Liveness | None = None
    ) -> _Unit:
        """Start a child and keep it running. With `liveness`, also restart it when it does not answer any more."""

        def start() -> Child:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the supervisor, who knows the order
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

        unit = _Unit(name, start, start(), time.monotonic(), liveness=liveness)
        self._units.append(unit)
        return unit

    def watch(self) -> NoReturn:
        """Restart every child that ends or stops answering, until a signal raises KeyboardInterrupt."""
        with _child_endings() as endings:
            while True:
                now = time.monotonic()
                for unit in self._units:
                    unit.check(now)
                due = [unit.due_at for unit in self._units if unit.due_at is not None]
                select.select([endings], [], [], max(0.0, min(due) - time.monotonic()) if due else None)
                with contextlib.suppress(BlockingIOError):
                    os.read(endings, 4096)

    def stop(self) -> None:
        """Workers first, so that they hand back what they hold; then the server; PostgreSQL last."""
        own = [unit for unit in self._units if unit.name != "PostgreSQL"]
        for group in ([u for u in own if u.name != "server"], [u for u in own if u.name == "server"]):
            for unit in group:
                unit.process.terminate()
            deadline = time.monotonic() + _STOP_SECONDS
            for unit in group:
                self._wait_or_kill(unit, deadline)
        if self.database is not None:
            self.database.stop()

    def kill(self) -> None:
        """End everything at once; PostgreSQL recovers at its next start."""
        for unit in self._units:
            if unit.name != "PostgreSQL":
                unit.process.kill()
                unit.process.wait()
        if self.database is not None:
            self.database.stop(immediate=True)

    @staticmethod
    def _wait_or_kill(unit: _Unit, deadline: float) -> None:
        try:
            unit.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _say(f"The {unit.name} did not stop within {_STOP_SECONDS:.0f} s and is killed")
            unit.process.kill()
            unit.process.wait()


def _stop(tree: _Tree) -> bool:
    """In order; or, when another Ctrl-C comes meanwhile, at once, which is answered by False."""
    try:
        with _interruptible():
            tree.stop()
    except KeyboardInterrupt:
        tree.kill()
        return False
    return True


# ── signals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and a closed terminal raise KeyboardInterrupt inside; after it none of them does anything."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        for number in _ENDING_SIGNALS:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in _ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _child_endings() -> Iterator[int]:
    """A descriptor that becomes readable when a child ends."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(previous)
        signal.signal(signal.SIGCHLD, before)
        os.close(reader)
        os.close(writer)
