"""What a pod's status says of the run in it: pure rules, from Kubernetes' words to ours."""

from __future__ import annotations

from lightkube.models.core_v1 import ContainerState, ContainerStateTerminated
from lightkube.resources.core_v1 import Pod

from tocsin.worker.executors.remote import Exit, exit_by_code, out_of_memory
from tocsin.worker.targets import Resources

CONTAINER = "job"

_NAMES = {"cpu": "cpu", "memory_mb": "memory", "disk_mb": "ephemeral-storage", "gpus": "nvidia.com/gpu"}
_NO_IMAGE = {"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable"}
_CANNOT_START = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}
_NEVER_STARTED = {"ContainerCannotRun", "StartError"}
_TAKEN_AWAY = {"Evicted", "Preempting", "NodeLost", "NodeShutdown", "NodeAffinity", "Shutdown", "Terminated"}


def exit_of(pod: Pod) -> Exit | None:
    """How the run ended; None while it has not. What Kubernetes would try again and again is an end, too."""
    status = pod.status
    if status is None:
        return None
    said = ": ".join(filter(None, (status.reason, status.message)))
    if status.reason == "DeadlineExceeded":
        return Exit(error_class="timeout", message=said)
    state = _state(pod)
    if _is_taken_away(pod):
        return Exit(error_class="evicted", message=said or "its node had to let it go")
    if state.terminated is not None:
        return _ended(state.terminated)
    if state.waiting is not None and state.waiting.reason in _NO_IMAGE | _CANNOT_START:
        error_class = "image" if state.waiting.reason in _NO_IMAGE else "start"
        return Exit(error_class=error_class, message=f"{state.waiting.reason}: {state.waiting.message or ''}")
    if status.phase == "Failed":
        return Exit(error_class="start", message=said or "its pod failed before it could start")
    return None


def can_be_adopted(pod: Pod) -> bool:
    """Whether another attempt may go on with it: it runs, will run, or has ended by itself and may have told nobody."""
    if pod.metadata is None or pod.metadata.deletionTimestamp is not None:
        return False
    exit_ = exit_of(pod)
    return exit_ is None or exit_.error_class in ("", "exit", "signal", "oom")


def is_over(pod: Pod) -> bool:
    """Whether nothing of it runs any more, nor ever will."""
    finished = pod.status is not None and pod.status.phase in ("Succeeded", "Failed")
    return finished or _state(pod).terminated is not None


def has_output(pod: Pod) -> bool:
    """Whether its container has been started, so that there may be something to read."""
    state = _state(pod)
    return state.running is not None or state.terminated is not None


def waits_for(pod: Pod | None) -> str:
    """Why it has not been started yet; empty if it has."""
    if pod is None:
        return "no pod was made for it; the events of its Job say why"
    if has_output(pod):
        return ""
    waiting = _state(pod).waiting
    if waiting is not None and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
        return f"{waiting.reason}: {waiting.message or ''}"
    for condition in (pod.status and pod.status.conditions) or []:
        if condition.type == "PodScheduled" and condition.status != "True":
            return f"{condition.reason}: {condition.message or ''}"
    return "its container is being made"


def quantities(asked: Resources) -> dict[str, str]:
    """What was asked for, as Kubernetes writes it."""
    wanted = {
        "cpu": asked.cpu and f"{round(asked.cpu * 1000)}m",
        "memory_mb": asked.memory_mb and f"{asked.memory_mb}Mi",
        "disk_mb": asked.disk_mb and f"{asked.disk_mb}Mi",
        "gpus": asked.gpus and str(asked.gpus),
    }
    return {_NAMES[name]: text for name, text in wanted.items() if text}


def enforced(asked: Resources, pod: Pod) -> dict[str, str | bool]:
    """For each limit that was asked for, how it is held: by the cluster, if the pod that came to be has it."""
    containers = pod.spec.containers if pod.spec is not None else []
    limits = next((c.resources.limits for c in containers if c.name == CONTAINER and c.resources), None) or {}
    held = {name for name, text in quantities(asked).items() if _same(str(limits.get(name, 0)), text)}
    return asked.enforced({ours: "pod" for ours, theirs in _NAMES.items() if theirs in held})


def _same(found: str, wanted: str) -> bool:
    """The API server writes quantities in its own way: 1000m becomes 1, 1024Mi becomes 1Gi."""
    return _amount(found) == _amount(wanted)


def _amount(text: str) -> float:
    factors = {"m": 0.001, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "k": 1e3, "M": 1e6, "G": 1e9}
    for suffix, factor in factors.items():
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)


def _state(pod: Pod) -> ContainerState:
    for container in (pod.status and pod.status.containerStatuses) or []:
        if container.name == CONTAINER and container.state is not None:
            return container.state
    return ContainerState()


def _is_taken_away(pod: Pod) -> bool:
    """Whether the cluster ended it for reasons of its own. A pod that ended well before that has ended well."""
    status = pod.status
    terminated = _state(pod).terminated
    if status is None or (terminated is not None and terminated.exitCode == 0):
        return False
    disrupted = any(c.type == "DisruptionTarget" and c.status == "True" for c in status.conditions or [])
    return status.phase == "Failed" and (status.reason in _TAKEN_AWAY or disrupted)


def _ended(state: ContainerStateTerminated) -> Exit:
    code = state.exitCode
    if state.reason == "OOMKilled":
        return out_of_memory(code)
    if state.reason in _NEVER_STARTED:
        return Exit(None, "start", state.message or state.reason)
    return exit_by_code(code)
