"""Jobs of a cluster, against a mock of its API (`kubecluster.py`): what is asked of it, and what its answers mean."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tocsin.errors import SetupError
from tocsin.worker.executors import Why
from tocsin.worker.executors import kubernetes as module
from tocsin.worker.executors.kubernetes import DEADLINE, OWNER, KubernetesExecutor
from tocsin.worker.targets import KubernetesTarget, Resources

from .conftest import until
from .kubecluster import Cluster, Pod
from .remote_kit import Book, attempt_of

WAIT = ["sh", "-c", "trap 'exit 0' TERM; echo up; sleep 300 & wait"]
DEAF = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"]


def sh(script: str, **more: Any) -> KubernetesTarget:
    return KubernetesTarget(image="busybox", command=["sh", "-c", script], **more)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as made:
        yield made


@pytest_asyncio.fixture
async def book() -> Book:
    return Book()


@pytest_asyncio.fixture
async def executor(cluster: Cluster, book: Book, tmp_path: Path) -> AsyncIterator[KubernetesExecutor]:
    made = KubernetesExecutor(cluster.kubeconfig(tmp_path), ["default", "batch"], ["reader"], "http://server")
    made.sink = book
    await made.open()
    yield made
    made.silence()
    await made.close()


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tocsin.worker.executors.remote.STOP_GRACE", 0.3)
    monkeypatch.setattr(module, "STOP_GRACE", 0.3)
    monkeypatch.setattr(module, "_END_IS_TOLD_WITHIN", 0.2)


async def test_what_the_cluster_is_asked_for(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    target = sh("echo $TOCSIN_ARGS $MINE $TOKEN; exit 3", env={"MINE": "yes"}, service_account="reader")
    needs = Resources(cpu=1.5, memory_mb=256, disk_mb=100)
    attempt = attempt_of(
        executor, target, timeout=10.5, resources=needs, args={"day": 3}, secrets={"TOKEN": "s3cret"}, run_id="the-run"
    )
    job = await cluster.until(lambda: cluster.jobs.get("tocsin-the-run"))
    assert await book.end_of(attempt) == ("failed", "exit", "exit code 3")
    assert book.lines[attempt.key] == ['stdout: {"day":3} yes s3cret']
    end = book.ends[attempt.key]
    assert end.exit_code == 3 and end.usage == {"enforced": {"cpu": "pod", "memory_mb": "pod", "disk_mb": "pod"}}

    spec, fence = job["spec"], str(attempt.run.fence)
    assert "s3cret" not in json.dumps(job) and attempt.run.token not in json.dumps(job), (
        "who reads Jobs reads no secret"
    )
    assert spec["backoffLimit"] == 0 and spec["activeDeadlineSeconds"] == 71 and spec["ttlSecondsAfterFinished"] == 600
    for labels in (job["metadata"]["labels"], spec["template"]["metadata"]["labels"]):
        assert labels["tocsin.dev/run"] == "the-run" and labels["tocsin.dev/fence"] == fence
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["serviceAccountName"] == "reader"
    assert pod["automountServiceAccountToken"] is True
    wanted = {"cpu": "1500m", "memory": "256Mi", "ephemeral-storage": "100Mi"}
    assert pod["containers"][0]["resources"] == {"requests": wanted, "limits": wanted}
    await cluster.until(lambda: not cluster.jobs and not cluster.pods and not cluster.secrets)


async def test_a_command_is_what_its_job_says_and_no_variable_of_the_pod(
    cluster: Cluster, executor: KubernetesExecutor, book: Book
) -> None:
    words = ["$(MINE)", "$$(MINE)", "$$", "$", "$(", "$MINE", "$(date)"]
    target = KubernetesTarget(image="any", command=["printf", "%s\\n", *words], env={"MINE": "$(TOCSIN_RUN_ID)"})
    attempt = attempt_of(executor, target)
    assert await book.end_of(attempt) == ("succeeded", None, "")
    assert book.lines[attempt.key] == [f"stdout: {word}" for word in words]
    shown = attempt_of(executor, sh("echo $MINE", env={"MINE": "$(TOCSIN_RUN_ID) $$"}))
    await book.end_of(shown)
    assert book.lines[shown.key] == ["stdout: $(TOCSIN_RUN_ID) $$"]


async def test_what_no_variable_can_hold_is_said_and_not_tried(
    cluster: Cluster, executor: KubernetesExecutor, book: Book
) -> None:
    attempt = attempt_of(executor, sh("exit 0"), args={"text": "ü" * 50_000}, run_id="large")
    outcome, error_class, message = await book.end_of(attempt)
    assert (outcome, error_class) == ("failed", "arguments") and "TOCSIN_ARGS has 100,011 bytes" in message
    assert not cluster.jobs


async def test_a_pod_without_an_account_has_no_token(
    cluster: Cluster, executor: KubernetesExecutor, book: Book
) -> None:
    attempt = attempt_of(executor, sh("exit 0", namespace="batch"), run_id="plain")
    job = await cluster.until(lambda: cluster.jobs.get("tocsin-plain"))
    assert (await book.end_of(attempt))[0] == "succeeded"
    assert job["metadata"]["namespace"] == "batch"
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (sh("true", namespace="kube-system"), "namespace kube-system"),
        (sh("true", service_account="admin"), "service account admin"),
    ],
)
async def test_rights_that_the_operator_did_not_give(
    cluster: Cluster, executor: KubernetesExecutor, book: Book, target: KubernetesTarget, says: str
) -> None:
    before = len(cluster.requests)
    outcome, error_class, message = await book.end_of(attempt_of(executor, target))
    assert (outcome, error_class) == ("failed", "start") and says in message
    asked = cluster.requests[before:]
    assert not [request for request in asked if request[0] != "GET"], "nothing was made"


def evicted(pod: Pod) -> None:
    pod.thing["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."}
    pod.container(terminated={"exitCode": 137, "reason": "Error"})
    pod.closed = True


def oom(pod: Pod) -> None:
    pod.thing["status"]["phase"] = "Failed"
    pod.container(terminated={"exitCode": 137, "reason": "OOMKilled"})
    pod.log += b"allocating\n"
    pod.closed = True


def deadline(pod: Pod) -> None:
    pod.thing["status"] |= {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active too long"}


def wrong_config(pod: Pod) -> None:
    pod.container(waiting={"reason": "CreateContainerConfigError", "message": "no such key"})


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        (evicted, ("failed", "evicted", "Evicted: The node was low on resource: memory.")),
        (oom, ("failed", "oom", "killed because it used more memory than it was given")),
        (deadline, ("timeout", "timeout", "DeadlineExceeded: Pod was active too long")),
        (wrong_config, ("failed", "start", "CreateContainerConfigError: no such key")),
        (None, ("failed", "image", 'ImagePullBackOff: Back-off pulling image "missing"')),
    ],
)
async def test_what_becomes_of_a_pod(
    cluster: Cluster, executor: KubernetesExecutor, book: Book, script: Any, ends: tuple[str, str, str]
) -> None:
    if script is not None:
        cluster.scripts["missing"] = script
    attempt = attempt_of(executor, KubernetesTarget(image="missing"))
    assert await book.end_of(attempt) == ends
    await cluster.until(lambda: not cluster.jobs and not cluster.pods and not cluster.secrets)
    if script is oom:
        assert book.lines[attempt.key] == ["stdout: allocating"]


def unschedulable(pod: Pod) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pod.thing["status"]["conditions"] = [condition]


async def test_a_pod_that_finds_no_node_says_so(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    cluster.scripts["big"] = unschedulable
    attempt = attempt_of(executor, KubernetesTarget(image="big"))
    under_way: Any = executor._under_way[attempt]
    await until(lambda: under_way._pod is not None and under_way._pod.status.conditions)
    under_way.stop("timeout")
    message = "still waiting after 60000 ms: Unschedulable: 0/3 nodes"
    assert await book.end_of(attempt) == ("timeout", "timeout", message)


async def test_a_pod_that_somebody_deletes(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    attempt = attempt_of(executor, KubernetesTarget(image="big"))
    cluster.scripts["big"] = lambda pod: None
    pod = await cluster.until(lambda: next(iter(cluster.pods.values()), None))
    await cluster._end_pod(pod)
    assert await book.end_of(attempt) == ("failed", "evicted", "its pod was deleted by somebody else")


@pytest.mark.parametrize("command", [WAIT, DEAF])
async def test_a_stop_is_told_when_the_cluster_has_proved_it(
    cluster: Cluster, executor: KubernetesExecutor, book: Book, command: list[str]
) -> None:
    attempt = attempt_of(executor, KubernetesTarget(image="busybox", command=command), run_id="stopped")
    await book.line_of(attempt, "up")
    cluster.held.add("tocsin-stopped")
    executor.stop(attempt)
    await cluster.until(lambda: "deletionTimestamp" in cluster.jobs["tocsin-stopped"]["metadata"])
    await cluster.until(lambda: not cluster.pods)  # killed by its own deletion; the Job is still there
    other = attempt_of(executor, sh("exit 0"))
    await book.end_of(other)
    assert attempt.key not in book.ends
    cluster.held.clear()
    await cluster.break_streams()
    assert (await book.end_of(attempt))[0] == "cancelled"
    assert not cluster.jobs and not cluster.pods


async def test_an_earlier_attempt_makes_way(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    """As when a worker was lost and its run is claimed again, here or elsewhere."""
    old = attempt_of(executor, KubernetesTarget(image="busybox", command=DEAF), run_id="again", fence=7)
    await book.line_of(old, "up")
    first = cluster.jobs["tocsin-again"]["metadata"]["uid"]
    new = attempt_of(executor, KubernetesTarget(image="busybox", command=WAIT), run_id="again", fence=8)
    await book.line_of(new, "up")
    assert len(cluster.pods) == 1 and cluster.jobs["tocsin-again"]["metadata"]["uid"] != first
    assert (await book.end_of(old))[:2] == ("failed", "evicted") or book.ends[old.key].error.class_ == "signal"  # type: ignore[union-attr]
    assert len(cluster.pods) == 1, "the end of the old one does nothing to the new one"
    late = attempt_of(executor, KubernetesTarget(image="busybox", command=WAIT), run_id="again", fence=6)
    assert (await book.end_of(late))[:2] == ("lost", "lost")
    assert len(cluster.pods) == 1 and new.key not in book.ends
    executor.stop(new)
    assert (await book.end_of(new))[0] == "cancelled"


async def test_a_name_that_is_taken(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    cluster.jobs["tocsin-taken"] = {"metadata": {"name": "tocsin-taken", "namespace": "default", "uid": "theirs"}}
    end = await book.end_of(attempt_of(executor, sh("true"), run_id="taken"))
    assert end == ("failed", "start", "there is a Job tocsin-taken which is not ours")
    assert cluster.jobs


async def test_streams_that_break(cluster: Cluster, executor: KubernetesExecutor, book: Book, tmp_path: Path) -> None:
    go = tmp_path / "go"
    attempt = attempt_of(executor, sh(f"echo one; while [ ! -e {go} ]; do sleep 0.02; done; echo two; exit 4"))
    await book.line_of(attempt, "one")
    cluster.oldest = cluster._version + 1  # the watch cannot go on where it was
    await cluster.break_streams()
    await book.line_of(attempt, "broke off")
    go.touch()
    assert await book.end_of(attempt) == ("failed", "exit", "exit code 4")
    assert book.lines[attempt.key][-1] == "stdout: two"


@pytest.mark.parametrize(
    ("fault", "error_class"),
    [
        (("POST", "/jobs", 403), "start"),
        (("POST", "/jobs", 422), "start"),
        (("POST", "/jobs", 503), "engine"),
        (("POST", "/secrets", 403), "start"),
        (("PATCH", "/jobs", 500), "engine"),
    ],
)
async def test_a_cluster_that_refuses_or_fails(
    cluster: Cluster, executor: KubernetesExecutor, book: Book, fault: tuple[str, str, int], error_class: str
) -> None:
    cluster.faults.append(fault)
    end = await book.end_of(attempt_of(executor, sh("true")))
    assert end == ("failed", error_class, "a fault of the test")
    assert not cluster.jobs and not cluster.pods and not cluster.secrets


async def test_a_deletion_that_fails_is_tried_again(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    attempt = attempt_of(executor, KubernetesTarget(image="busybox", command=WAIT))
    await book.line_of(attempt, "up")
    cluster.faults += [("DELETE", "/jobs", 500), ("DELETE", "/jobs", 503), ("GET", "/jobs/", 500)]
    cluster.faults += [("GET", "/jobs", 500)]  # and the watch for its end
    executor.stop(attempt)
    assert (await book.end_of(attempt))[0] == "cancelled"
    assert not cluster.jobs and not cluster.faults


async def test_a_stop_before_it_has_begun(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    attempt = attempt_of(executor, sh("true"))
    executor.stop(attempt)
    assert (await book.end_of(attempt))[0] == "cancelled"
    assert not cluster.jobs and not cluster.secrets


async def test_all_run_on_when_the_worker_goes(cluster: Cluster, executor: KubernetesExecutor, book: Book) -> None:
    attempts = [attempt_of(executor, KubernetesTarget(image="busybox", command=DEAF)) for _ in range(3)]
    for attempt in attempts:
        await book.line_of(attempt, "up")
    await executor.kill_all(Why("drained", "bye"))
    assert book.handed == {attempt.key for attempt in attempts} and not book.ends
    assert len(cluster.jobs) == len(cluster.pods) == 3


async def test_what_does_not_run_yet_goes_with_its_worker(
    cluster: Cluster, executor: KubernetesExecutor, book: Book
) -> None:
    cluster.scripts["never"] = lambda pod: pod.container(waiting={"reason": "ImagePullBackOff", "message": "no"})
    attempt = attempt_of(executor, KubernetesTarget(image="never", command=WAIT))
    await executor.kill_all(Why("drained", "bye"))
    assert await book.end_of(attempt) == ("lost", "drained", "bye")
    assert not cluster.jobs and not cluster.pods


@pytest.fixture
def another(cluster: Cluster, tmp_path: Path) -> KubernetesExecutor:
    """Of a worker on another machine."""
    made = KubernetesExecutor(cluster.kubeconfig(tmp_path), ["default"], [], "http://server")
    made.owner = made.owner._replace(boot="another", machine="another")
    made.labels = made.labels | {module.WORKER: "another"}
    return made


async def test_the_next_attempt_goes_on_with_the_pod(
    cluster: Cluster, executor: KubernetesExecutor, another: KubernetesExecutor, book: Book, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    target = sh(f"mkdir {tmp_path}/once || exit 9; echo up; while [ ! -e {go} ]; do sleep 0.02; done; exit 3")
    old = attempt_of(executor, target, run_id="goes-on", fence=7)
    await book.line_of(old, "up")
    (pod,) = cluster.pods.values()
    cluster.faults += [("PATCH", "/jobs", 409), ("PATCH", "/pods", 409)]  # somebody else changes it at this moment
    another.sink = other = Book()
    new = attempt_of(another, target, run_id="goes-on", fence=8)
    await other.line_of(new, "up")
    assert not cluster.faults and list(cluster.pods.values()) == [pod]
    # The worker that had it is alive, and knows nothing yet: neither its end nor a stop does anything to the pod.
    executor.stop(old)
    assert (await book.end_of(old))[0] in ("cancelled", "failed")
    assert list(cluster.pods.values()) == [pod] and not pod.closed
    go.touch()
    assert await other.end_of(new) == ("failed", "exit", "exit code 3")
    await cluster.until(lambda: not (cluster.jobs or cluster.pods or cluster.secrets))
    await another.close()


async def test_an_end_that_nobody_saw_is_told_by_the_next_attempt(
    cluster: Cluster, executor: KubernetesExecutor, another: KubernetesExecutor, book: Book, tmp_path: Path
) -> None:
    """What ended by itself ended, though it failed: to do it again is for who counts attempts to decide."""
    go = tmp_path / "go"
    target = sh(f"echo up; while [ ! -e {go} ]; do sleep 0.02; done; kill -9 $$")
    old = attempt_of(executor, target, run_id="unseen", fence=7)
    await book.line_of(old, "up")
    executor.silence()
    await executor.kill_all()
    go.touch()
    (pod,) = cluster.pods.values()
    await cluster.until(lambda: pod.closed)
    another.sink = other = Book()
    new = attempt_of(another, target, run_id="unseen", fence=8)
    assert await other.end_of(new) == ("failed", "signal", "killed by SIGKILL")
    assert other.lines[new.key][1:] == ["stdout: up"]
    await cluster.until(lambda: not cluster.jobs)
    await another.close()


async def test_time_that_has_passed_counts(
    cluster: Cluster, executor: KubernetesExecutor, another: KubernetesExecutor, book: Book
) -> None:
    target = KubernetesTarget(image="busybox", command=WAIT)
    old = attempt_of(executor, target, run_id="late", fence=7, timeout=60.0)
    await book.line_of(old, "up")
    notes = cluster.jobs["tocsin-late"]["metadata"]["annotations"]
    notes[DEADLINE] = str(int(notes[DEADLINE]) - 61)  # as if it had run for longer than it may
    another.sink = other = Book()
    new = attempt_of(another, target, run_id="late", fence=8, timeout=60.0)
    assert (await other.end_of(new))[:2] == ("timeout", "timeout")
    assert not cluster.jobs and not cluster.pods
    await another.close()


async def test_what_nobody_adopts_is_deleted(
    cluster: Cluster, executor: KubernetesExecutor, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ADOPTED_WITHIN", 0.2)
    target = KubernetesTarget(image="busybox", command=WAIT)
    attempt = attempt_of(executor, target, run_id="unwanted", fence=7)
    await book.line_of(attempt, "up")
    await executor.kill_all()
    adopted = attempt_of(executor, target, run_id="wanted", fence=7)
    await book.line_of(adopted, "up")
    executor.silence()
    await executor.kill_all()
    executor.serve(book)
    again = attempt_of(executor, target, run_id="wanted", fence=8)
    await book.line_of(again, "up")
    await cluster.until(lambda: "tocsin-unwanted" not in cluster.jobs)
    await until(lambda: not executor._let_go)
    assert list(cluster.jobs) == ["tocsin-wanted"] and again.key not in book.ends


async def test_what_could_not_be_killed_in_time_ends_for_nobody(
    cluster: Cluster, executor: KubernetesExecutor, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is over, the cluster is slow to delete, and the worker goes on under another id."""
    monkeypatch.setattr("tocsin.worker.executors.remote.KILL_PATIENCE", 0.1)
    cluster.scripts["slow"] = lambda pod: None
    attempt = attempt_of(executor, KubernetesTarget(image="slow", command=WAIT), run_id="slow")
    await cluster.until(lambda: cluster.pods)
    cluster.held.add("tocsin-slow")
    executor.stop(attempt)
    await cluster.until(lambda: "deletionTimestamp" in cluster.jobs["tocsin-slow"]["metadata"])
    executor.silence()
    await executor.kill_all()
    assert "tocsin-slow" in cluster.jobs
    executor.sink = later = Book()
    cluster.held.clear()
    await cluster.break_streams()
    await cluster.until(lambda: not cluster.jobs)
    assert (await later.end_of(attempt_of(executor, sh("exit 0"))))[0] == "succeeded"
    assert attempt.key not in book.ends and attempt.key not in later.ends


async def test_what_a_dead_worker_left_is_deleted_and_nothing_else(
    cluster: Cluster, executor: KubernetesExecutor, book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ADOPTED_WITHIN", 0.0)
    alive = attempt_of(executor, KubernetesTarget(image="busybox", command=WAIT))
    await book.line_of(alive, "up")
    (mine,) = cluster.jobs.values()
    here = executor.owner
    owners = {
        "dead": here._replace(started=here.started + 1),
        "elsewhere": here._replace(boot="another", machine="another"),
        "hidden": here._replace(namespace="another"),
    }
    for name, owner in owners.items():
        notes = {OWNER: str(owner), DEADLINE: "99999999999"}
        labels = mine["metadata"]["labels"] | {"tocsin.dev/run": name}
        metadata = {"name": name, "namespace": "default", "uid": name, "labels": labels, "annotations": notes}
        metadata["resourceVersion"] = "1"
        cluster.jobs[name] = {"metadata": metadata, "spec": mine["spec"]}
    other = KubernetesExecutor(cluster.kubeconfig(tmp_path), ["default"], [], "http://server")
    await other.open()
    assert "dead" in cluster.jobs, "an attempt may come for it"
    other.serve(Book())
    await cluster.until(lambda: "dead" not in cluster.jobs)
    await other.close()
    assert {"elsewhere", "hidden", mine["metadata"]["name"]} == set(cluster.jobs)
    assert alive.key not in book.ends


async def test_a_cluster_that_does_not_let_us_work(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no way to the cluster"):
        await KubernetesExecutor(str(tmp_path / "none"), ["default"], [], "").open()
    executor = KubernetesExecutor(cluster.kubeconfig(tmp_path), ["default"], [], "")
    cluster.faults.append(("GET", "/jobs", 403))
    with pytest.raises(SetupError, match="does not let us work"):
        await executor.open()
    await executor.close()
