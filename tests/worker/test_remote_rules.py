"""Rules of the executors whose work is done elsewhere: whose a leftover is, which limit holds, what a code means."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightkube.resources.core_v1 import Pod

from tocsin.worker.executors import groups as kernel
from tocsin.worker.executors import podstate
from tocsin.worker.executors.remote import Exit, exit_by_code
from tocsin.worker.owner import Owner, is_orphan, started_at
from tocsin.worker.targets import Resources

words = st.sampled_from(["", "a", "b"])
owners = st.builds(Owner, machine=words, boot=words, namespace=words, pid=st.integers(1, 3), started=st.integers(0, 2))


@given(owners)
def test_an_owner_is_read_as_it_was_written(owner: Owner) -> None:
    assert Owner.parse(str(owner)) == owner


@pytest.mark.parametrize("text", ["", "a/b/c", "a/b/c/x/1", "a/b/c/1/-1", "a/b/c/1/2/3"])
def test_what_others_wrote_is_nobodys(text: str) -> None:
    assert Owner.parse(text) is None


@given(owners, owners, st.dictionaries(st.integers(1, 3), st.integers(0, 2)), st.floats(0, 1e6), st.floats(0, 1e6))
def test_what_a_living_worker_started_is_never_an_orphan(
    owner: Owner, here: Owner, alive: dict[int, int], deadline: float, now: float
) -> None:
    """Reference: who can be alive is spared. Beyond what can be seen from here, all are, within their time."""
    orphan = is_orphan(owner, deadline, here=here, now=now, started=alive.get)
    if owner.boot == here.boot and owner.namespace == here.namespace:
        assert orphan == (alive.get(owner.pid) != owner.started)
    elif owner.boot == here.boot:
        assert not orphan or now > deadline
    else:
        assert not orphan or (owner.machine == here.machine and here.machine != "")


def test_a_process_is_known_by_its_start() -> None:
    here = Owner.here()
    assert here.pid == os.getpid() and here.started == started_at(os.getpid()) and here.boot
    child = subprocess.Popen(["sleep", "300"])
    started = started_at(child.pid)
    assert started is not None and started >= here.started
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started_at(child.pid) is None, "a zombie does nothing any more"
    child.wait()
    assert started_at(child.pid) is None


@pytest.mark.parametrize(
    ("code", "exit_"),
    [
        (0, Exit(0)),
        (1, Exit(1, "exit", "exit code 1")),
        (128, Exit(128, "exit", "exit code 128")),
        (137, Exit(None, "signal", "killed by SIGKILL")),
        (139, Exit(None, "signal", "killed by SIGSEGV")),
        (255, Exit(255, "exit", "exit code 255")),
    ],
)
def test_what_a_code_means(code: int, exit_: Exit) -> None:
    assert exit_by_code(code) == exit_


# ── limits of a container ────────────────────────────────────────────────────────────────────────────────────────────

ASKED = Resources(cpu=0.5, memory_mb=64, disk_mb=10, gpus=1)


def machine(root: Path, groups: str, files: dict[str, str]) -> dict[str, Any]:
    for name, text in {"proc/7/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return {"Id": "c0ffee", "State": {"Pid": 7}, "HostConfig": {"Memory": 64 << 20, "NanoCpus": 5 * 10**8}}


def held(asked: Resources, inspected: dict[str, Any], root: Path) -> dict[str, str | bool]:
    group = kernel.Group(inspected["State"]["Pid"] or 0, inspected["Id"], root)
    return kernel.enforced(asked, group, inspected)


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (
            "0::/machine.slice/libpod-c0ffee.scope",
            {
                "machine.slice/libpod-c0ffee.scope/memory.max": str(64 << 20),
                "machine.slice/libpod-c0ffee.scope/cpu.max": "50000 100000",
            },
        ),
        (
            "5:memory:/docker/c0ffee\n4:cpu,cpuacct:/docker/c0ffee\n0::/docker/c0ffee",
            {
                "memory/docker/c0ffee/memory.limit_in_bytes": str(64 << 20),
                "cpu,cpuacct/docker/c0ffee/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/docker/c0ffee/cpu.cfs_period_us": "100000",
            },
        ),
    ],
)
def test_a_limit_holds_if_the_kernel_shows_it(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    inspected = machine(tmp_path, groups, files)
    told = held(ASKED, inspected, tmp_path)
    assert told == {"memory_mb": "cgroup", "cpu": "cgroup", "disk_mb": False, "gpus": False}
    inspected["HostConfig"]["DeviceRequests"] = [{"Count": 1}]
    assert held(Resources(gpus=1), inspected, tmp_path) == {"gpus": "device"}
    assert held(Resources(), inspected, tmp_path) == {}


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/docker/c0ffee", {}),
        ("0::/docker/c0ffee", {"docker/c0ffee/memory.max": "max", "docker/c0ffee/cpu.max": "max 100000"}),
        ("0::/docker/c0ffee", {"docker/c0ffee/memory.max": str(65 << 20), "docker/c0ffee/cpu.max": "60000 100000"}),
        # the engine made no group of its own: this is somebody else's limit
        ("0::/system.slice", {"system.slice/memory.max": str(1 << 20), "system.slice/cpu.max": "1000 100000"}),
        ("4:cpu:/docker/c0ffee", {"cpu/docker/c0ffee/cpu.cfs_quota_us": "-1"}),
    ],
)
def test_a_limit_that_the_engine_only_wrote_down_does_not_hold(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    told = held(ASKED, machine(tmp_path, groups, files), tmp_path)
    assert told == {"memory_mb": False, "cpu": False, "disk_mb": False, "gpus": False}


def test_a_container_that_is_gone_or_out_of_sight_proves_nothing(tmp_path: Path) -> None:
    for pid in (0, 8, None):
        inspected = {"Id": "c0ffee", "State": {"Pid": pid}, "HostConfig": {}}
        assert held(Resources(memory_mb=64), inspected, tmp_path) == {"memory_mb": False}


@pytest.mark.parametrize(
    ("groups", "file", "text", "kills"),
    [
        ("0::/x/c0ffee", "x/c0ffee/memory.events", "low 0\nmax 3\noom 2\noom_kill 1\noom_group_kill 0", 1),
        ("4:memory:/c0ffee", "memory/c0ffee/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2", 2),
        ("0::/x/c0ffee", "x/c0ffee/memory.events", "oom 2\noom_kill 0", 0),
        ("0::/x/c0ffee", "x/c0ffee/other", "", None),
        ("0::/other", "other/memory.events", "oom_kill 1", None),
    ],
)
def test_a_death_for_memory_is_seen(tmp_path: Path, groups: str, file: str, text: str, kills: int | None) -> None:
    machine(tmp_path, groups, {file: text})
    group = kernel.Group(7, "c0ffee", tmp_path)
    assert group.kills == kills and bool(group) == ("c0ffee" in groups)


# ── pods ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pod(phase: str = "Running", *, state: dict[str, Any] | None = None, **status: Any) -> Pod:
    required = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
    containers = [{"name": "sidecar", "state": {"running": {}}, **required}]
    if state is not None:
        containers.append({"name": "job", "state": state, **required})
    made: Pod = Pod.from_dict({"status": {"phase": phase, "containerStatuses": containers, **status}})
    return made


DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


@pytest.mark.parametrize(
    ("found", "error_class"),
    [
        (pod("Pending"), None),
        (pod("Pending", state={"waiting": {"reason": "ContainerCreating"}}), None),
        (pod("Pending", state={"waiting": {"reason": "ErrImagePull"}}), None),  # the first failure: tried again
        (pod("Pending", state={"waiting": {"reason": "ImagePullBackOff"}}), "image"),
        (pod("Pending", state={"waiting": {"reason": "InvalidImageName"}}), "image"),
        (pod("Pending", state={"waiting": {"reason": "CreateContainerError"}}), "start"),
        (pod(state={"running": {}}), None),
        (pod(state={"running": {}}, conditions=DISRUPTED), None),  # it is asked to go, and runs still
        (pod("Succeeded", state={"terminated": {"exitCode": 0}}), ""),
        (pod("Failed", state={"terminated": {"exitCode": 0}}, reason="Evicted"), ""),
        (pod("Failed", state={"terminated": {"exitCode": 1}}), "exit"),
        (pod("Failed", state={"terminated": {"exitCode": 139, "reason": "Error"}}), "signal"),
        (pod("Failed", state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}), "oom"),
        (pod("Failed", state={"terminated": {"exitCode": 128, "reason": "StartError"}}), "start"),
        (pod("Failed", state={"terminated": {"exitCode": 143}}, conditions=DISRUPTED), "evicted"),
        (pod("Failed", reason="Evicted"), "evicted"),
        (pod("Failed", reason="NodeShutdown"), "evicted"),
        (pod("Failed", reason="DeadlineExceeded"), "timeout"),
        (pod("Failed", reason="OutOfmemory"), "start"),
        (Pod(), None),
    ],
)
def test_what_a_pod_says(found: Pod, error_class: str | None) -> None:
    exit_ = podstate.exit_of(found)
    assert (None if exit_ is None else exit_.error_class) == error_class


@given(st.sampled_from(["1000m", "1", "1.0"]), st.sampled_from(["1024Mi", "1Gi", "1073741824"]))
def test_a_limit_of_a_pod_is_known_however_it_is_written(cpu: str, memory: str) -> None:
    limits = {"cpu": cpu, "memory": memory}
    containers = [{"name": "sidecar"}, {"name": "job", "resources": {"limits": limits}}]
    made: Any = Pod.from_dict({"spec": {"containers": containers}})
    asked = Resources(cpu=1, memory_mb=1024, gpus=2)
    assert podstate.enforced(asked, made) == {"cpu": "pod", "memory_mb": "pod", "gpus": False}
    assert podstate.enforced(Resources(cpu=2), made) == {"cpu": False}
