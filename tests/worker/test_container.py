"""Containers by a real engine (podman's socket): what they see, what holds them, and that nothing stays."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from tests import PATIENCE
from tocsin.errors import SetupError
from tocsin.worker.executors import Why, container, remote
from tocsin.worker.executors.container import DEADLINE, FENCE, OWNER, RUN, ContainerExecutor
from tocsin.worker.targets import ContainerTarget, Resources

from .conftest import started, until
from .podman import IMAGE, Podman, missing
from .remote_kit import Book, attempt_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(missing()), reason=f"containers cannot be tried here: {missing()}"),
]

WAIT = "trap 'echo asked; exit 0' TERM; echo up; sleep 300 & wait"
DEAF = "trap '' TERM; echo up; while :; do sleep 0.1; done"


def sh(script: str, **more: Any) -> ContainerTarget:
    return ContainerTarget(image=IMAGE, command=["sh", "-c", script], pull="never", **more)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def podman() -> AsyncIterator[Podman]:
    async with Podman() as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module")
async def executor(podman: Podman) -> AsyncIterator[ContainerExecutor]:
    made = ContainerExecutor(podman.engine, "http://server")
    made.sink = Book()
    await made.open()
    yield made
    made.silence()
    await made.close()


def book_of(executor: ContainerExecutor) -> Book:
    assert isinstance(executor.sink, Book)
    return executor.sink


async def names(executor: ContainerExecutor) -> set[str]:
    found = await executor.docker.containers.list(all="true")
    return {container["Names"][0].lstrip("/") for container in found}


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STOP_GRACE", 0.3)


async def test_what_a_container_sees(executor: ContainerExecutor) -> None:
    script = (
        'echo "$MINE|$TOKEN|$TOCSIN_ARGS|$TOCSIN_RUN_ID|$TOCSIN_URL|$PATH"; echo complaint >&2;'
        "ls /sys/class/net; cat /proc/self/status"
    )
    target = sh(script, env={"MINE": "ü", "PATH": "/bin"})
    attempt = attempt_of(executor, target, args={"day": 3}, secrets={"TOKEN": "s3cret"}, run_id="sees")
    assert (await book_of(executor).end_of(attempt))[0] == "succeeded"
    complaint, first, *rest = sorted(book_of(executor).lines[attempt.key], key=lambda line: (line[:6] != "stderr", 0))
    assert complaint == "stderr: complaint"
    assert first == 'stdout: ü|s3cret|{"day":3}|sees|http://server|/bin'
    assert rest[0] == "stdout: lo", "no network but its own loopback"
    status = dict(line.removeprefix("stdout: ").split(":\t", 1) for line in rest if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    for needless in (13, 27, 29):  # NET_RAW, MKNOD, AUDIT_WRITE
        assert not int(status["CapBnd"], 16) >> needless & 1
    assert await names(executor) == set()


async def test_labels_say_whose_it_is(executor: ContainerExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STOP_GRACE", 30.0)  # it is to end by itself
    attempt = attempt_of(executor, sh(WAIT), run_id="labelled", fence=7)
    await book_of(executor).line_of(attempt, "up")
    found = await executor.docker.containers.get("tocsin-labelled")
    labels = found["Config"]["Labels"]
    assert (labels[RUN], labels[FENCE], labels[OWNER]) == ("labelled", "7", str(executor.owner))
    executor.stop(attempt)
    assert (await book_of(executor).end_of(attempt))[0] == "cancelled"
    assert book_of(executor).lines[attempt.key] == ["stdout: up", "stdout: asked"]


async def test_limits_are_real(executor: ContainerExecutor) -> None:
    hog = sh("exec dd if=/dev/zero of=/dev/null bs=600M count=1")
    attempt = attempt_of(executor, hog, resources=Resources(memory_mb=64, cpu=0.5, disk_mb=1))
    end = await book_of(executor).end_of(attempt)
    usage = book_of(executor).ends[attempt.key].usage
    assert usage is not None
    if usage["enforced"]["memory_mb"]:
        assert usage == {"enforced": {"memory_mb": "cgroup", "cpu": "cgroup", "disk_mb": False}}
        assert end[:2] == ("failed", "oom")
    else:  # an engine without control groups
        assert end[0] == "succeeded"


async def test_an_image_that_cannot_be_had(executor: ContainerExecutor) -> None:
    for image, pull in (("localhost/no-such:1", "never"), ("registry.invalid/x:1", "missing"), (IMAGE, "always")):
        if pull == "always":
            image = "registry.invalid/" + image.rpartition("/")[2]
        attempt = attempt_of(executor, ContainerTarget(image=image, pull=pull))
        outcome, error_class, message = await book_of(executor).end_of(attempt)
        assert (outcome, error_class) == ("failed", "image") and message.startswith(image)
    assert await names(executor) == set()


async def test_an_earlier_attempt_makes_way(executor: ContainerExecutor) -> None:
    book = book_of(executor)
    old = attempt_of(executor, sh(DEAF), run_id="again", fence=7)
    await book.line_of(old, "up")
    new = attempt_of(executor, sh(WAIT), run_id="again", fence=8)
    await book.line_of(new, "up")
    assert (await book.end_of(old))[:2] == ("failed", "engine")
    late = attempt_of(executor, sh(WAIT), run_id="again", fence=6)
    assert (await book.end_of(late))[:2] == ("lost", "lost")
    assert new.key not in book.ends and await names(executor) == {"tocsin-again"}, "neither end touched the new one"
    executor.stop(new)
    assert (await book.end_of(new))[0] == "cancelled"
    assert await names(executor) == set()


async def test_a_name_that_is_taken(executor: ContainerExecutor, podman: Podman) -> None:
    theirs = await executor.docker.containers.create({"Image": IMAGE, "Cmd": ["true"]}, name="tocsin-taken")
    outcome, error_class, message = await book_of(executor).end_of(attempt_of(executor, sh("true"), run_id="taken"))
    assert (outcome, error_class) == ("failed", "start") and "tocsin-taken" in message
    assert await names(executor) == {"tocsin-taken"}
    await theirs.delete(force=True)


async def test_what_a_dead_worker_left_is_removed_and_nothing_else(executor: ContainerExecutor, podman: Podman) -> None:
    dead = ContainerExecutor(podman.engine, "http://server")
    dead.owner = executor.owner._replace(started=executor.owner.started + 1)
    dead.sink = Book()
    orphan, ours = attempt_of(dead, sh(DEAF), run_id="orphan"), attempt_of(executor, sh(WAIT), run_id="ours")
    await book_of(dead).line_of(orphan, "up")
    await book_of(executor).line_of(ours, "up")
    labels = {OWNER: str(dead.owner), RUN: "labels-of-an-image", DEADLINE: "0"}
    config = {"Image": IMAGE, "Cmd": ["true"], "Labels": labels}
    stranger = await executor.docker.containers.create(config, name="stranger")
    await executor.open()
    assert await names(executor) == {"tocsin-ours", "stranger"}
    await stranger.delete(force=True)
    assert (await book_of(dead).end_of(orphan))[:2] == ("failed", "engine")
    await dead.close()
    executor.stop(ours)
    assert (await book_of(executor).end_of(ours))[0] == "cancelled"


async def test_a_run_lives_through_a_restart_of_its_engine(
    executor: ContainerExecutor, podman: Podman, tmp_path: Path
) -> None:
    attempt = attempt_of(executor, sh("echo up; sleep 3; exit 4"))
    await book_of(executor).line_of(attempt, "up")
    await podman.restart()
    assert await book_of(executor).end_of(attempt) == ("failed", "exit", "exit code 4")
    assert await names(executor) == set()


async def test_all_are_killed_when_the_worker_goes(executor: ContainerExecutor) -> None:
    attempts = [attempt_of(executor, sh(DEAF)) for _ in range(3)]
    for attempt in attempts:
        await book_of(executor).line_of(attempt, "up")
    await executor.kill_all(Why("drained", "bye"))
    ends = [await book_of(executor).end_of(attempt) for attempt in attempts]
    assert ends == [("lost", "drained", "bye")] * 3 and await names(executor) == set()


async def test_a_stop_before_it_has_begun(executor: ContainerExecutor) -> None:
    attempt = attempt_of(executor, sh("true"))
    executor.stop(attempt)
    assert (await book_of(executor).end_of(attempt))[0] == "cancelled"
    assert await names(executor) == set()


async def test_processes_are_bounded_and_gone_with_its_container(
    executor: ContainerExecutor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(container, "_PROCESSES", 40)
    script = "trap '' TERM; echo up; (while :; do sleep 300 & done) 2>/dev/null; exec sleep 300"
    bomb = sh(script, env={"BOMB": str(tmp_path)})
    attempt = attempt_of(executor, bomb)
    await book_of(executor).line_of(attempt, "up")

    def fragments() -> int:
        return sum(b"BOMB=" + bytes(tmp_path) in environ_of(process.pid) for process in psutil.process_iter())

    await until(lambda: fragments() >= 30)
    assert fragments() <= 41
    executor.stop(attempt)
    assert (await book_of(executor).end_of(attempt))[0] == "cancelled"
    assert fragments() == 0 and await names(executor) == set()


def environ_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_no_container_outlives_its_worker(podman: Podman, executor: ContainerExecutor, number: int) -> None:
    """Nobody starts another worker here: who kills the container is the guard."""
    settings = {"container_engine": podman.engine}
    async with started(lease=2.0, heartbeat=0.2, settings=settings) as (gateway, process):
        target = {"kind": "container", "image": IMAGE, "command": ["sh", "-c", DEAF], "pull": "never"}
        run = gateway.submit(target)
        await gateway.line_of(run, "up")
        process.send_signal(number)
        async with asyncio.timeout(PATIENCE):
            while await executor.docker.containers.list():  # noqa: ASYNC110 (nobody would set an event)
                await asyncio.sleep(0.05)
    await executor.open()
    assert await names(executor) == set(), "and what is left of it goes when a worker starts"


async def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    executor = ContainerExecutor(f"unix://{tmp_path}/none.sock", "")
    with pytest.raises(SetupError, match="does not work"):
        await executor.open()
    await executor.close()
    with pytest.raises(SetupError, match="must be a socket"):
        ContainerExecutor("tcp://127.0.0.1:2375", "")
