"""PostgreSQL servers of a test's own on TCP: one to ill-treat, or a primary with a synchronous standby to promote.

    with Servers(cluster) as servers:
        primary = servers.copy("one")        # of the test process's cluster, with its keys and its migrated database
        standby = servers.standby("two", primary)
        primary.kill()
        standby.promote()
        primary.start()                      # nobody has told it that it is the primary no longer

The copies are made by `pg_basebackup`. Leaving the block ends every server, by its id.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import Cluster
from tests.ports import free_port
from tocsin.store.embedded import Installation, die_with_parent
from tocsin.store.home import Account, database_account, private_folder

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "autovacuum_naptime": "5s",
    "wal_receiver_status_interval": "1s",
    "log_timezone": "UTC",
}
_READY_SECONDS = 20.0


class Postgres:
    """One server, on its port for good."""

    def __init__(self, servers: Servers, name: str, data: Path) -> None:
        self.name, self.data = name, data
        self.port = free_port()
        self.log = servers.home / f"{name}.log"
        self._servers = servers
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, room: Path | None = None, **settings: str) -> Postgres:
        """Start it and wait until it takes connections. `room`: a folder where it finds a file system of 16 MB, which
        only it sees (root alone can give it that)."""
        given = _SETTINGS | {"port": str(self.port)} | settings
        command = [self._servers.program("postgres"), "-D", str(self.data)]
        for name, value in given.items():
            command += ["-c", f"{name}={value}"]
        identity = self._servers.identity
        if room is not None:
            user, group = identity["user"], identity["group"]
            mount = f"mount -t tmpfs -o size=16m,uid={user},gid={group},mode=0700 tmpfs {room}"
            become = f"setpriv --reuid={user} --regid={group} --clear-groups --pdeathsig=QUIT"
            command = ["unshare", "-m", "--", "sh", "-c", f'{mount} && exec {become} "$@"', "sh", *command]
            identity = {}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGQUIT),
                **identity,
            )
        self._wait(lambda: self._ready("ready"), "takes connections")
        return self

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Fast (SIGINT) or immediate (SIGQUIT)."""
        if self._process is not None and self.alive:
            self._process.send_signal(how)
            self._process.wait(30)

    def kill(self) -> None:
        """kill -9 of the server and of all its children, as if the power went."""
        if self._process is not None and self.alive:
            self.signal_all(signal.SIGKILL)
            self._process.wait(10)

    def promote(self) -> float:
        """Make the standby a primary; the instant (Unix time) from which it takes writes."""
        self._servers.run("pg_ctl", "promote", "--wait", "--pgdata", str(self.data))
        return time.time()

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, the parent first; each child has a process group of its own."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(number)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    def url(self, database: str = "tocsin") -> str:
        """The unprivileged login's."""
        return f"postgresql://{self._servers.login}@127.0.0.1:{self.port}/{database}"

    def query(self, statement: str, database: str = "postgres") -> str:
        """What a statement of the superuser answers, as text."""
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--username", "postgres", "--dbname", database]
        return self._servers.run(
            "psql", "--no-psqlrc", "--quiet", "--tuples-only", "--no-align", *where, "-c", statement
        )

    def configure(self, **settings: str) -> None:
        """Change settings of the running server."""
        for name, value in settings.items():
            self.query(f"alter system set {name} = '{value}'")
        self.query("select pg_reload_conf()")

    def _ready(self, state: str) -> bool:
        assert self._process is not None
        assert self.alive, f"{self.name} ended: {self.log.read_text()[-2000:]}"
        with contextlib.suppress(OSError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return len(lines) > 7 and lines[0] == str(self._process.pid) and lines[7].strip() == state
        return False

    def wait_for(self, condition: str, what: str) -> None:
        """Until a condition in SQL holds."""
        self._wait(lambda: self.query(f"select {condition}").strip() == "t", what)

    def _wait(self, fits: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + _READY_SECONDS
        while not fits():
            assert time.monotonic() < give_up_at, f"not within {_READY_SECONDS:g} s: {self.name} {what}"
            time.sleep(0.02)


class Servers:
    """Makes servers. A context: nothing of them is left afterwards."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._installation: Installation = cluster.server._installation
        self._account: Account | None = database_account()
        self._made: list[Postgres] = []
        self.login = cluster.template_url.partition("//")[2].partition("@")[0]
        # Not pytest's own folder: that is 0700, and the user who runs PostgreSQL for root could not get there.
        self.home = Path(tempfile.mkdtemp(prefix="tocsin-servers-"))
        self.home.chmod(0o711)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_exc: object) -> None:
        for server in self._made:
            server.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    @property
    def identity(self) -> dict[str, Any]:
        """As whom PostgreSQL's programs run."""
        if self._account is None:
            return {}
        return {"user": self._account.uid, "group": self._account.gid, "extra_groups": []}

    def program(self, name: str) -> str:
        return self._installation.program(name)

    def run(self, program: str, *arguments: str) -> str:
        """Run one of PostgreSQL's programs; what it says."""
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PGPASSWORD": self._cluster.superuser_password}
        command = [self.program(program), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", **self.identity)
        assert done.returncode == 0, f"{program}: {done.stderr}"
        return done.stdout

    def copy(self, name: str, folder: Path | None = None, **settings: str) -> Postgres:
        """A running copy of the test process's own cluster."""
        source = ["--host", str(self._cluster.home / "run"), "--port", "5432"]
        return self._copy(name, folder or self.home / name, source).start(**settings)

    def standby(self, name: str, primary: Postgres) -> Postgres:
        """A synchronous standby: from now on the primary acknowledges what both have."""
        source = ["--host", "127.0.0.1", "--port", str(primary.port), "--write-recovery-conf"]
        standby = self._copy(name, self.home / name, source).start()
        primary.configure(synchronous_standby_names="*")
        primary.wait_for("exists (select from pg_stat_replication where sync_state = 'sync')", "has its standby")
        return standby

    def _copy(self, name: str, folder: Path, source: list[str]) -> Postgres:
        data = private_folder(folder, self._account)
        how = ["--checkpoint", "fast", "--no-sync", "--username", "postgres", "--pgdata", str(data)]
        self.run("pg_basebackup", *source, *how)
        server = Postgres(self, name, data)
        self._made.append(server)
        return server
