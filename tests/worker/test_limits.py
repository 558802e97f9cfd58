"""What a program may use and see: limits, its folder, the sandbox; and hostile programs that the worker outlives."""

from __future__ import annotations

import glob
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tocsin import wire
from tocsin.worker import cgroups
from tocsin.worker.folders import Folders, _namespace

from .conftest import alive, naming, started
from .gateway import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROCESSES = 40
PYTHON = [sys.executable, "-I", "-S", "-c"]
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """One worker for all tests, whose runs may have few processes; when it has gone, so have its groups and folders."""
    async with started(grace=0.5, heartbeat=0.2, processes=PROCESSES) as (gateway, process):
        yield gateway
        process.send_signal(signal.SIGTERM)
        await process.wait()
        left = glob.glob(f"/sys/fs/cgroup/**/tocsin-{process.pid}-*", recursive=True)
        assert not left and not glob.glob(f"/tmp/tocsin-runs-{process.pid}-*")


async def end_of(gateway: Gateway, run: wire.ClaimedRun) -> wire.Finished:
    end = await gateway.end_of(run)
    assert end.usage is not None
    return end


def exists(path: str) -> bool:
    return os.path.exists(path)


def told(end: wire.Finished) -> tuple[str, str | None]:
    return end.outcome, end.error and end.error.class_


async def need_bounded_processes(gateway: Gateway) -> None:
    """Ask before anything forks without end."""
    end = await end_of(gateway, gateway.process("true"))
    assert end.usage is not None
    if end.usage["enforced"]["processes"] != "cgroup":
        pytest.skip("no control group bounds the number of a run's processes on this machine")


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_program_that_takes_more_memory_than_it_was_given(gateway: Gateway) -> None:
    hog = [*PYTHON, "keep = []\nwhile True: keep.append(b'x' * (1 << 20))"]
    end = await end_of(gateway, gateway.process(*hog, resources={"memory_mb": 64}))
    assert end.usage is not None
    if end.usage["enforced"]["memory_mb"] == "cgroup":
        assert told(end) == ("failed", "oom") and end.error is not None and "64 MB" in end.error.message
    else:
        assert end.usage["enforced"]["memory_mb"] == "per process" and told(end) == ("failed", "exit")
    within = [*PYTHON, "len(b'x' * (20 << 20))"]
    assert told(await end_of(gateway, gateway.process(*within, resources={"memory_mb": 64}))) == ("succeeded", None)


async def test_a_child_that_takes_the_memory_counts_too(gateway: Gateway) -> None:
    hog = "import os\nif os.fork(): raise SystemExit(os.wait()[1] != 0)\nkeep = b'x' * (200 << 20)"
    end = await end_of(gateway, gateway.process(*PYTHON, hog, resources={"memory_mb": 64}))
    assert end.usage is not None
    how = end.usage["enforced"]["memory_mb"]
    assert told(end) == ("failed", "oom" if how == "cgroup" else "exit") and end.exit_code == 1


async def test_a_fork_bomb_is_bounded_and_leaves_nothing(gateway: Gateway, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    bomb.write_text("#!/bin/sh\nwhile :; do setsid $0 & done 2>/dev/null\n")
    bomb.chmod(0o755)
    await need_bounded_processes(gateway)
    run = gateway.process(str(bomb), timeout=2.0)
    neighbour = gateway.process("sh", "-c", "echo fine")
    assert told(await end_of(gateway, neighbour)) == ("succeeded", None)
    assert told(await end_of(gateway, run))[0] in ("timeout", "failed")
    assert not naming(bomb)


async def test_no_more_processes_than_allowed(gateway: Gateway) -> None:
    await need_bounded_processes(gateway)
    count = """
import os, signal
try:
    while True:
        if os.fork() == 0: signal.pause()
        print("one", flush=True)
except OSError: pass
"""
    end = await end_of(gateway, run := gateway.process(*PYTHON, count))
    assert told(end) == ("succeeded", None) and len(gateway.text_of(run)) == PROCESSES - 1


async def test_a_file_that_grows_beyond_what_was_given(gateway: Gateway) -> None:
    write = "f = open('big', 'wb')\nfor _ in range(9): f.write(b'x' * (1 << 20)); f.flush()"
    end = await end_of(gateway, gateway.process(*PYTHON, write, resources={"disk_mb": 4}))
    assert end.usage is not None and end.usage["enforced"]["disk_mb"] == "per file"
    assert told(end) == ("failed", "exit")  # Python ignores the signal, and sees the error


async def test_a_program_gets_no_more_of_the_processors_than_it_was_given(gateway: Gateway) -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    end = await end_of(gateway, gateway.process(*PYTHON, burn, resources={"cpu": 0.25}))
    assert end.outcome == "succeeded" and end.usage is not None
    if not end.usage["enforced"]["cpu"]:
        pytest.skip("no control group bounds a run's processors on this machine")
    assert end.usage["cpu_ms"] < 0.6 * end.ran_ms


async def test_limits_that_hold_for_all(gateway: Gateway) -> None:
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_CORE), r.getrlimit(r.RLIMIT_NOFILE)[1] <= 65536)"
    run = gateway.process("sh", "-c", 'sleep 0.05; exec "$@"', "sh", *PYTHON, code)
    assert told(await end_of(gateway, run)) == ("succeeded", None)
    assert gateway.text_of(run) == ["(0, 0) True"]


async def test_much_without_a_line_end(gateway: Gateway) -> None:
    worker = psutil.Process(int(gateway.registered[0].name.rpartition("-")[2]))
    before = worker.memory_info().rss
    run = gateway.process("head", "-c", "200M", "/dev/zero")
    end = await end_of(gateway, run)
    assert told(end) == ("succeeded", None) and worker.memory_info().rss < before + (64 << 20)
    assert "dropped" in gateway.text_of(run)[-1] and sum(map(len, gateway.text_of(run))) <= 10 << 20


# ── what it sees ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_working_folder_of_its_own_that_goes_with_it(gateway: Gateway) -> None:
    script = 'pwd; ls -A | wc -l; echo "$TMPDIR"; mkdir -p a/b && touch a/b/c && chmod 0 a/b && mktemp -d'
    run = gateway.process("sh", "-c", script)
    assert told(await end_of(gateway, run)) == ("succeeded", None)
    folder, entries, tmpdir, made = gateway.text_of(run)
    assert entries == "0" and tmpdir == folder and made.startswith(folder + "/") and not exists(folder)
    other = gateway.process("pwd")
    await end_of(gateway, other)
    assert gateway.text_of(other) != [folder]


async def test_a_program_beside_its_folder(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("#!/bin/sh\npwd\n")
    (tmp_path / "here").chmod(0o755)
    run = gateway.process("./here", cwd=str(tmp_path))
    assert told(await end_of(gateway, run)) == ("succeeded", None) and gateway.text_of(run) == [str(tmp_path)]
    assert told(await gateway.end_of(gateway.process("./here"))) == ("failed", "start")


async def test_a_shell_line(gateway: Gateway) -> None:
    alone = gateway.submit({"kind": "process", "command": "echo a b | tr ' ' '\\n' | tail -1", "shell": True})
    words = ["echo $#: $1, $2", "$(echo evil); `echo evil`", "; echo evil"]
    given = gateway.submit({"kind": "process", "command": words, "shell": True})
    plain = gateway.submit({"kind": "process", "command": ["echo", "$(echo evil)"]})
    for run in (alone, given, plain):
        assert told(await end_of(gateway, run)) == ("succeeded", None)
    assert gateway.text_of(alone) == ["b"] and gateway.text_of(plain) == ["$(echo evil)"]
    assert gateway.text_of(given) == ["2: $(echo evil); `echo evil`, ; echo evil"]


async def test_the_workers_key_is_in_no_environment_that_a_run_could_read(gateway: Gateway) -> None:
    worker = psutil.Process(int(gateway.registered[0].name.rpartition("-")[2]))
    held = gateway.process("sh", "-c", "echo up; sleep 300")
    await gateway.line_of(held, "up")
    family = worker.children(recursive=True)
    assert len(family) >= 3
    for process in family:
        assert "the-key" not in str(process.environ()) and "the-key" not in str(process.cmdline())
    assert "the-key" not in str(worker.cmdline())
    gateway.order_stop(held)
    await end_of(gateway, held)


# ── the sandbox ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sandboxed(gateway: Gateway, code: str, **more: object) -> wire.ClaimedRun:
    if "sandbox" not in gateway.registered[0].targets:
        pytest.skip("bubblewrap is not here, or may not make namespaces")
    if not os.access(SYSTEM_PYTHON, os.X_OK):
        pytest.skip(f"there is no {SYSTEM_PYTHON} to run in the sandbox")
    command = [SYSTEM_PYTHON, "-I", "-S", "-c", code]
    return gateway.submit({"kind": "process", "command": command, "sandbox": True, **more})


async def test_what_a_sandboxed_program_can_do(gateway: Gateway, tmp_path: Path) -> None:
    secret = tmp_path / "credentials.toml"
    secret.write_text("key")
    code = f"""
import json, os, socket
def can(what):
    try:
        what()
    except OSError:
        return False
    return True
print(json.dumps({{
    "write here": can(lambda: open("mine", "w").close()),
    "write to tmp": can(lambda: open("/tmp/mine", "w").close()),
    "write to the system": can(lambda: open("/usr/mine", "w").close()),
    "see a file of the worker's user": can(lambda: os.stat({str(secret)!r})),
    "reach the server": can(lambda: socket.create_connection(("127.0.0.1", {gateway.url.rpartition(":")[2]}), 1)),
    "be root": os.getuid() == 0,
    "see other processes": len([name for name in os.listdir("/proc") if name.isdigit()]) > 3,
    "see what others have in tmp": len(os.listdir("/tmp")) > 2,
}}))
"""
    run = sandboxed(gateway, code)
    assert told(await end_of(gateway, run)) == ("succeeded", None), gateway.text_of(run)
    able = {name for name, can in json.loads(gateway.text_of(run)[0]).items() if can}
    assert able == {"write here", "write to tmp"} and not exists("/tmp/mine")


async def test_a_sandbox_has_no_window(gateway: Gateway) -> None:
    """The server refuses such a job; a worker does not trust it to."""
    end = await gateway.end_of(sandboxed(gateway, "", cwd="/"))
    assert told(end) == ("failed", "start")


async def test_how_a_sandboxed_program_ends(gateway: Gateway) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    exits, dies = sandboxed(gateway, "raise SystemExit(3)"), sandboxed(gateway, code)
    end = await end_of(gateway, exits)
    assert (told(end), end.exit_code) == (("failed", "exit"), 3)
    end = await end_of(gateway, dies)
    assert told(end) == ("failed", "signal") and end.error is not None and "SIGSEGV" in end.error.message


async def test_a_sandboxed_program_is_asked_before_it_is_killed(gateway: Gateway) -> None:
    code = """
import signal, sys
def end(*_): print("asked", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True: signal.pause()
"""
    asked = sandboxed(gateway, code)
    await gateway.line_of(asked, "up")
    gateway.order_stop(asked)
    assert told(await end_of(gateway, asked)) == ("cancelled", None) and gateway.text_of(asked) == ["up", "asked"]
    deaf = sandboxed(gateway, code.replace("end)", "signal.SIG_IGN)"))
    await gateway.line_of(deaf, "up")
    worker = psutil.Process(int(gateway.registered[0].name.rpartition("-")[2]))
    inside = [p.pid for p in worker.children(recursive=True) if SYSTEM_PYTHON in p.cmdline()]
    gateway.order_stop(deaf)
    assert told(await end_of(gateway, deaf)) == ("cancelled", None)
    assert inside and not [pid for pid in inside if alive(pid)]


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_workers_that_are_gone_left_behind_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    here = _namespace()
    names = (f"{here}-4194305-x", f"{here}-{os.getpid()}-x", "x")
    dead, living, other = (tmp_path / f"tocsin-runs-{name}" for name in names)
    for folder in (dead, living, other):
        (folder / "run" / "deep").mkdir(parents=True)
    folders = Folders()
    await folders.sweep()
    folders.close()
    assert not dead.exists() and living.exists() and other.exists()


async def test_a_folder_that_others_cleaned_away_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folders = Folders()
    os.rmdir(os.path.join(tmp_path, os.listdir(tmp_path)[0]))
    path = folders.make()
    open(os.path.join(path, "file"), "w").close()  # noqa: ASYNC230 (nobody waits)
    await folders.remove(path)
    assert not exists(path)
    folders.close()
    assert os.listdir(tmp_path) == []


def unified(folder: Path, procs: str, subtree: str = "") -> Path:
    """A folder that looks like a mounted hierarchy of version 2, and a /proc/self that says that we are in `a/b`."""
    group, proc = folder / "mount" / "a" / "b", folder / "proc"
    for made in (group, proc):
        made.mkdir(parents=True)
    for name, text in {"controllers": "cpu memory pids io", "subtree_control": subtree, "procs": procs}.items():
        (group / f"cgroup.{name}").write_text(text)
    (proc / "cgroup").write_text("0::/a/b\n")
    (proc / "mountinfo").write_text(f"30 1 0:26 / {folder}/mount rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n")
    return proc


def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Take down what is written, since the kernel is not there to take it."""
    written: dict[str, str] = {}

    def write(path: Path, value: object) -> None:
        written["/".join(path.parts[-2:])] = str(value)

    monkeypatch.setattr(cgroups, "_write", write)
    return written


async def test_a_delegated_group_of_version_2_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = kernel(monkeypatch)
    found = cgroups.find(unified(tmp_path, f"{os.getpid()}\n"))
    assert found.controllers == {"cpu", "memory", "pids"}
    assert written.pop("tocsin-worker/cgroup.procs") == str(os.getpid())
    assert set(written.values()) == {"+cpu +memory +pids"} and "b/cgroup.subtree_control" in written
    written.clear()
    group = found.make(processes=9, memory_mb=2, cpu=1.5)
    assert len(group.doors) == 1 and Path(group.doors[0]).parent.is_dir()
    limits = {name.partition("/")[2]: value for name, value in written.items()}
    assert limits == {"pids.max": "9", "memory.max": str(2 << 20), "memory.swap.max": "0", "cpu.max": "150000 100000"}
    found.make(cpu=0.0001)
    assert list(written.values())[-1] == "1000 100000", "the kernel gives no less"
    Path(group.doors[0]).with_name("memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert group.ooms() == 1


async def test_a_group_that_others_live_in_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = kernel(monkeypatch)
    assert not cgroups.find(unified(tmp_path, f"{os.getpid()}\n1\n")).controllers and not written


async def test_in_a_container_the_hierarchy_may_begin_further_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(monkeypatch)
    (tmp_path / "memory").mkdir()
    (tmp_path / "cgroup").write_text("4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n")
    (tmp_path / "mountinfo").write_text(
        f"30 1 0:26 /docker/x {tmp_path}/memory rw - cgroup cgroup rw,memory\n"
        f"31 1 0:27 /docker/x {tmp_path}/absent rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 1 0:28 / /tmp rw - tmpfs tmpfs rw\n"
    )
    found = cgroups.find(tmp_path)
    assert found.controllers == {"memory"} and len(list((tmp_path / "memory").iterdir())) == 1
