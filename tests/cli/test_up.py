"""`tocsin up` on real processes: with stand-ins for server and worker, and the whole of it at the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import PATIENCE
from tests.certificates import Authority
from tests.ports import free_port
from tocsin.cli.up import (
    backoff,
    local_url,
    own_url,
    read_credentials,
    server_environment,
    up,
    worker_environment,
)
from tocsin.errors import SetupError
from tocsin.settings import Settings

# `up` with children that write down what happens to them, so that the supervisor is tested by itself.
STAND_INS = '''
import os, sys
from pathlib import Path
from tocsin.cli import up as module
from tocsin.settings import Settings

CHILD = """
import http.server, os, signal, sys
role, notes = sys.argv[1:3]
def note(word):
    with open(notes, "a") as file:
        file.write(f"{role} {word} {os.getpid()}\\\\n")
def end(*_):
    note("stopped")
    os._exit(0)
signal.signal(signal.SIGTERM, (lambda *_: note("refused")) if os.environ.get("STUBBORN") == role else end)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(os.environ["TOCSIN_PORT"])), Ready) if role == "server" else None
note("started")
if server: server.serve_forever()
while True: signal.pause()
"""
module._tocsin = lambda role, *_: [sys.executable, "-c", CHILD, role, os.environ["NOTES"]]
module._prepare_database = lambda settings, known: {"key": known.get("key", "k1"), "worker_key": "w1"}
module._BACKOFF_SECONDS = (0.1, 1.0)
home, port, database = (os.environ.get(name, "") for name in ("HOME_OF_TEST", "PORT", "GIVEN_DATABASE"))
silent = float(os.environ.get("UNRESPONSIVE", "30"))
given = dict(home=Path(home), port=int(port), database_url=database, unresponsive_seconds=silent)
sys.exit(module.up(Settings(**given)))
'''


@pytest.fixture
def home() -> Iterator[Path]:
    """A home everyone may reach: pytest's own folders are closed to the user PostgreSQL runs as."""
    base = Path(tempfile.mkdtemp(prefix="tocsin-"))
    base.chmod(0o755)
    yield base / "home"
    for process in processes_of(base):
        process.kill()
    shutil.rmtree(base)


def processes_of(base: Path) -> list[psutil.Process]:
    """Every process that works on this folder: its home stands in their environment, or they work in it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            places = [
                process.cwd(),
                process.environ().get("TOCSIN_HOME", ""),
                process.environ().get("HOME_OF_TEST", ""),
            ]
            if any(place.startswith(str(base)) for place in places):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def port() -> int:
    return free_port()


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.02)
    return value


def _outer() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_") and k != "DATABASE_URL"}


class Up:
    """A running `tocsin up`."""

    def __init__(self, command: list[str], environment: dict[str, str], stderr: Any = None) -> None:
        self.process = subprocess.Popen(
            command,
            env=_outer() | environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return
        raise AssertionError(f"ended without saying {text!r}: {self.lines}")

    def finish(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self.process.stdout.close()
        return self.process.wait(30)

    def kill_tree(self) -> None:
        tree = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        for process in tree:
            process.kill()
        self.finish()


class Staged:
    """`up` with stand-ins."""

    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port, self.notes = home, port, home.parent / "notes"

    def start(self, **extra: str) -> Up:
        environment = {"HOME_OF_TEST": str(self.home), "PORT": str(self.port), "NOTES": str(self.notes)}
        running = Up([sys.executable, "-c", STAND_INS], environment | extra)
        running.wait_for("Tocsin is ready")
        until(lambda: self.pids("worker"), "the worker starts")
        return running

    def words(self) -> list[str]:
        return [line.rpartition(" ")[0] for line in self.notes.read_text().splitlines()] if self.notes.exists() else []

    def pids(self, role: str) -> list[int]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [int(line.split()[2]) for line in lines if line.startswith(f"{role} started")]


@pytest.fixture
def staged(home: Path, port: int) -> Staged:
    return Staged(home, port)


def test_ctrl_c_stops_worker_then_server_then_postgresql(staged: Staged, home: Path) -> None:
    running = staged.start()
    assert running.lines[-1] == "Tocsin is ready"
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
    assert staged.words() == ["server started", "worker started", "worker stopped", "server stopped"]
    assert "database system is shut down" in (home / "logs" / "postgres.log").read_text().splitlines()[-1]
    assert processes_of(home.parent) == []
    assert (home / "lock").read_text() == ""


def test_a_given_database_is_used_instead(staged: Staged, home: Path) -> None:
    running = staged.start(GIVEN_DATABASE="postgresql://elsewhere/tocsin")
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
    assert {path.name for path in home.iterdir()} == {"lock", "credentials.toml", "secrets"}
    assert [path.name for path in (home / "secrets").iterdir()] == ["master-keys"]
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_credentials_are_private_and_stay(staged: Staged, home: Path, port: int) -> None:
    for _ in range(2):
        running = staged.start()
        running.process.terminate()
        assert running.finish() == 0
    path = home / "credentials.toml"
    assert tomllib.loads(path.read_text()) == {"url": f"http://127.0.0.1:{port}", "key": "k1", "worker_key": "w1"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text('key = "k2"\nworker_key = 3\n')
    assert read_credentials(path) == {"key": "k2"}
    path.write_text("no toml")
    assert read_credentials(path) == {}


@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_child_that_dies_is_started_again(staged: Staged, role: str) -> None:
    running = staged.start()
    os.kill(staged.pids(role)[0], signal.SIGKILL)
    running.wait_for(f"The {role} ended (SIGKILL); starting it again in")
    until(lambda: len(staged.pids(role)) == 2, f"the {role} is back")
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0


def test_a_server_that_does_not_answer_is_replaced(staged: Staged) -> None:
    running = staged.start(UNRESPONSIVE="1")
    [first] = staged.pids("server")
    os.kill(first, signal.SIGSTOP)
    running.wait_for(f"The server (process {first}) has not answered for")
    running.wait_for(f"The server did not answer (process {first}); starting it again in")
    until(lambda: len(staged.pids("server")) == 2, "the server is back")
    assert not psutil.pid_exists(first)
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
    assert len(staged.pids("worker")) == 1, "nothing else was touched"


def test_postgresql_is_started_again(staged: Staged, home: Path) -> None:
    running = staged.start()
    pid_file = home / "data" / "postmaster.pid"
    first = int(pid_file.read_text().split()[0])
    os.kill(first, signal.SIGKILL)
    running.wait_for("The PostgreSQL ended (SIGKILL)")

    def back() -> bool:
        lines = pid_file.read_text().splitlines() if pid_file.exists() else []
        return len(lines) > 7 and int(lines[0]) != first and lines[7].strip() == "ready"

    until(back, "PostgreSQL is back")
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0


def test_nothing_survives_a_killed_supervisor_and_the_next_one_takes_over(staged: Staged, home: Path) -> None:
    running = staged.start()
    running.process.kill()
    running.finish()
    again = staged.start()  # at once: it has to wait for the port and for PostgreSQL by itself
    until(lambda: staged.words().count("worker stopped") == 1, "the first worker is told to stop")
    again.process.send_signal(signal.SIGINT)
    assert again.finish() == 0
    assert processes_of(home.parent) == []


def test_a_second_ctrl_c_kills(staged: Staged, home: Path) -> None:
    running = staged.start(STUBBORN="worker")
    running.process.send_signal(signal.SIGINT)
    until(lambda: "worker refused" in staged.words(), "the worker refuses to stop")
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 130
    assert processes_of(home.parent) == []


def test_a_second_up_on_the_same_home_is_refused(staged: Staged, home: Path) -> None:
    running = staged.start()
    with pytest.raises(SetupError, match=rf"already running \(pid {running.process.pid}\)"):
        up(Settings(home=home))
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0


def test_a_port_in_use_is_named(home: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {number} of 127.0.0.1 is already in use.*--port"):
            up(Settings(home=home, port=number))
    assert signal.getsignal(signal.SIGINT) is before
    assert not (home / "data").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_open_doors_are_refused(home: Path, host: str) -> None:
    with pytest.raises(SetupError, match="TOCSIN_INSECURE"):
        up(Settings(home=home, host=host))
    assert not home.exists()


def test_addresses() -> None:
    assert all(Settings(host=host).is_local for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"))
    assert not any(Settings(host=host).is_local for host in ("10.0.0.1", "localhost.example", ""))
    assert local_url(Settings(port=1)) == "http://127.0.0.1:1"
    assert local_url(Settings(host="0.0.0.0", port=1)) == "http://127.0.0.1:1"
    assert local_url(Settings(host="::", port=1, tls_cert="c.pem")) == "https://[::1]:1"
    named = Settings(tls_cert="c.pem", public_url="https://tocsin.example.com")
    assert own_url(named) == "https://tocsin.example.com"
    assert own_url(replace(named, tls_cert="")) == "http://127.0.0.1:8470", "a proxy has the certificate: not for us"


def test_a_certificate_opens_the_door(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="tls-cert"):
        Settings(host="0.0.0.0").refuse_open_doors()
    for settings in (Settings(host="0.0.0.0", tls_cert="c.pem"), Settings(host="0.0.0.0", insecure=True), Settings()):
        settings.refuse_open_doors()
    with pytest.raises(SetupError, match="tls_cert"):
        Settings(tls_key="k.pem")
    with pytest.raises(SetupError, match="cannot be read"):
        up(Settings(home=tmp_path / "home", tls_cert=str(tmp_path / "none.pem")))
    assert not (tmp_path / "home").exists()


def test_an_open_door_is_said_aloud(tmp_path: Path) -> None:
    environment = {"TOCSIN_HOME": str(tmp_path), "DATABASE_URL": "postgresql://127.0.0.1:1/none?connect_timeout=1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tocsin", "server", "--host", "0.0.0.0", "--insecure"],
        env=_outer() | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    with server, contextlib.closing(server.stderr) as said:
        assert any("keys cross the network readable" in line for line in said)
        server.kill()


def test_backoff_grows_to_a_bound() -> None:
    assert [backoff(n, 0.0) for n in (1, 2, 3, 6, 1000)] == [1, 2, 4, 30, 30]
    assert backoff(6, 1.0) == 22.5
    assert backoff(1, 1.0) == 1


def test_children_get_the_settings_but_a_worker_no_database(home: Path) -> None:
    settings = Settings(home=home, database_url="postgresql://x", insecure=True, lease_seconds=20.0)
    outer = {"PATH": "/bin", "TOCSIN_LEASE_SECONDS": "5", "TOCSIN_KEY": "mine", "DATABASE_URL": "postgresql://y"}
    server = server_environment(settings, outer)
    assert server == {
        "PATH": "/bin",
        "TOCSIN_HOME": str(home),
        "TOCSIN_HOST": "127.0.0.1",
        "TOCSIN_PORT": "8470",
        "TOCSIN_INSECURE": "true",
        "TOCSIN_LEASE_SECONDS": "20.0",
        "TOCSIN_LOG_LEVEL": "warning",
        "DATABASE_URL": "postgresql://x",
    }
    assert Settings.load(server) == Settings(
        home=home, database_url="postgresql://x", insecure=True, lease_seconds=20.0, log_level="warning"
    )
    worker = worker_environment(settings, outer, "http://u", "w")
    assert worker.keys() - server.keys() == {"TOCSIN_URL", "TOCSIN_WORKER_KEY"}
    assert server.keys() - worker.keys() == {"DATABASE_URL"}
    assert server_environment(settings, {"TOCSIN_LOG_LEVEL": "info"})["TOCSIN_LOG_LEVEL"] == "info"


def test_a_master_key_is_the_servers_alone(home: Path) -> None:
    settings = Settings(home=home, database_url="postgresql://x", master_key="the-key")
    outer = {"TOCSIN_MASTER_KEY": "the-key"}
    assert server_environment(settings, outer)["TOCSIN_MASTER_KEY"] == "the-key"
    assert "the-key" not in str(worker_environment(settings, outer, "http://u", "w"))
    assert "the-key" not in repr(settings)


# ── the whole of it ──────────────────────────────────────────────────────────────────────────────────────────────


def call(credentials: dict[str, str], path: str, body: dict[str, Any] | None = None) -> Any:
    trust = ssl.create_default_context(cafile=credentials.get("ca"))
    request = urllib.request.Request(
        credentials["url"] + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {credentials['key']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10, context=trust) as answer:
        return json.load(answer)


def run_to_success(credentials: dict[str, str]) -> str:
    job = call(credentials, "/v1/jobs", {"target": {"kind": "process", "command": ["true"]}})

    def succeeded() -> bool:
        runs = call(credentials, f"/v1/runs?job={job['id']}")["items"]
        return [run["state"] for run in runs] == ["succeeded"]

    until(succeeded, "the run succeeds")
    return str(job["id"])


def test_jobs_run_and_survive_the_death_of_everything(home: Path, port: int) -> None:
    command = [sys.executable, "-m", "tocsin", "up"]
    environment = {"TOCSIN_HOME": str(home), "TOCSIN_PORT": str(port)}
    running = Up(command, environment)
    running.wait_for("Tocsin is ready")
    first = tomllib.loads((home / "credentials.toml").read_text())
    job = run_to_success(first)
    running.kill_tree()

    again = Up(command, environment)
    again.wait_for("Tocsin is ready")
    second = tomllib.loads((home / "credentials.toml").read_text())
    assert second == first
    assert call(second, f"/v1/jobs/{job}")["id"] == job
    run_to_success(second)
    again.process.send_signal(signal.SIGINT)
    assert again.finish() == 0
    assert processes_of(home.parent) == []


def test_a_server_whose_event_loop_is_held_is_replaced(home: Path, port: int) -> None:
    """The second submission of a server holds its event loop for ever. The restarted server handles the next one."""
    environment = {
        "TOCSIN_HOME": str(home),
        "TOCSIN_PORT": str(port),
        "TOCSIN_UNRESPONSIVE_SECONDS": "8",
        "TOCSIN_FAILPOINTS": "submit.before_commit=block:2",
    }
    with tempfile.TemporaryFile("w+") as errors:
        running = Up([sys.executable, "-m", "tocsin", "up"], environment, errors)
        running.wait_for("Tocsin is ready")
        credentials = tomllib.loads((home / "credentials.toml").read_text())
        run_to_success(credentials)
        with pytest.raises(OSError):
            call(credentials, "/v1/jobs", {"target": {"kind": "process", "command": ["true"]}})
        running.wait_for("starting it again in")

        def answers() -> bool:
            with contextlib.suppress(OSError):
                return bool(call(credentials, "/readyz"))
            return False

        until(answers, "the new server is ready")
        run_to_success(credentials)
        running.process.send_signal(signal.SIGINT)
        assert running.finish() == 0
        errors.seek(0)
        told = errors.read()
    assert "the event loop is held" in told and "tocsin/failpoints.py" in told, told
    assert "Fatal Python error: Aborted" in told, told


def test_over_tls_with_an_authority_of_ones_own(home: Path, port: int, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("up")
    command = [sys.executable, "-m", "tocsin", "up", "--tls-cert", str(cert), "--tls-key", str(key)]
    environment = {"TOCSIN_HOME": str(home), "TOCSIN_PORT": str(port)}
    unknown = subprocess.run(command, env=_outer() | environment, capture_output=True, text=True, timeout=60)
    assert unknown.returncode != 0 and "TOCSIN_CA" in unknown.stderr, "found out before a worker does"

    running = Up(command, environment | {"TOCSIN_CA": str(authority.ca)})
    running.wait_for("Tocsin is ready")
    credentials = tomllib.loads((home / "credentials.toml").read_text())
    assert credentials["url"] == f"https://127.0.0.1:{port}"
    run_to_success(credentials)
    # The file says whom to trust: commands on this machine need no more than they did.
    doctor = subprocess.run(
        [sys.executable, "-m", "tocsin", "doctor", "--json"],
        env=_outer() | {"TOCSIN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {check["check"]: check for check in json.loads(doctor.stdout)["checks"]}
    assert found["server"]["status"] == "ok", doctor.stdout
    assert "ends in 23 h" in found["certificate"]["detail"] and found["certificate"]["status"] == "warn"
    words = [process.cmdline() for process in processes_of(home.parent)]
    assert words and not [word for line in words for word in line if "tcn_" in word], "no key among the arguments"
    running.process.send_signal(signal.SIGINT)
    assert running.finish() == 0
