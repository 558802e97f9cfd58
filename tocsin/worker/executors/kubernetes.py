"""Target `kubernetes`: a Job of the cluster for each attempt.

A Job is named after its run, so a cluster never has two attempts of one run in a namespace. It outlives its worker: one
that goes, or is lost, lets it run on. The run's next attempt, here or elsewhere, has a higher fence, finds the Job in
its place, and adopts it, which is to write its own fence on it; what an earlier attempt left that cannot be adopted, it
deletes, and waits until it is gone. What nobody adopts is deleted after a while by whoever let it go, or by a worker
that starts on the same machine, or ends by its own deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from typing import Any

from httpx2 import HTTPStatusError
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod, Secret
from lightkube.types import PatchType

from tocsin.errors import SetupError
from tocsin.telemetry import get_logger
from tocsin.worker.executors import STOP_GRACE, Attempt, Sink, environment, overlong
from tocsin.worker.executors.cluster import (
    FENCE,
    LOOK_ANEW,
    RUN,
    TROUBLE,
    Cluster,
    Pods,
    code_of,
    connect,
    label_of,
    words_of,
)
from tocsin.worker.executors.podstate import (
    CONTAINER,
    can_be_adopted,
    enforced,
    exit_of,
    has_output,
    is_over,
    quantities,
    waits_for,
)
from tocsin.worker.executors.remote import Exit, Remote, RemoteExecutor, Superseded, pauses, whole
from tocsin.worker.owner import Owner, is_orphan
from tocsin.worker.targets import KubernetesTarget

log = get_logger("worker")

WORKER, OWNER, DEADLINE, WORK = "tocsin.dev/worker", "tocsin.dev/owner", "tocsin.dev/deadline", "tocsin.dev/work"
_MANAGED = {"app.kubernetes.io/managed-by": "tocsin"}
_PULL = {"missing": "IfNotPresent", "always": "Always", "never": "Never"}

_LAST_OUTPUT = 30.0
_END_IS_TOLD_WITHIN = 5.0  # after the end of a pod's output
_BEYOND_TIMEOUT = 60.0  # so long after its time-out a Job ends by itself, if nobody is there to end it
_KEPT_AFTER = 600  # seconds that a Job stays that nobody deletes
_ADOPTED_WITHIN = 600.0  # seconds; what was let go and no attempt wants for so long is deleted


class KubernetesExecutor(RemoteExecutor):
    """The Jobs of one worker."""

    kind = "kubernetes"

    def __init__(self, cluster: str, namespaces: list[str], service_accounts: list[str], url: str) -> None:
        super().__init__()
        self.namespaces, self.service_accounts, self.url = namespaces, service_accounts, url
        self.owner = Owner.here()
        self.labels = {**_MANAGED, WORKER: hashlib.sha256(str(self.owner).encode()).hexdigest()[:20]}
        self._cluster = cluster
        self._client: Cluster | None = None
        self._pods: dict[str, Pods] = {}
        self._let_go: dict[tuple[str, str, str], asyncio.Task[None] | None] = {}

    @property
    def client(self) -> Cluster:
        """The cluster's API."""
        if self._client is None:
            self._client = connect(self._cluster)
        return self._client

    def remote(self, attempt: Attempt) -> Remote:
        return _Job(self, attempt)

    def pods(self, namespace: str) -> Pods:
        """Our pods in a namespace, watched from the first time that they are asked for."""
        if namespace not in self._pods:
            self._pods[namespace] = Pods(self.client, namespace, self.labels)
        return self._pods[namespace]

    def let_go(self, namespace: str, name: str, fence: str) -> None:
        """Nobody sees this Job through any more, until an attempt adopts it."""
        self._let_go.setdefault((namespace, name, fence))

    def serve(self, sink: Sink) -> None:
        super().serve(sink)
        for key, task in self._let_go.items():
            # Not before: while there is no server to be heard, no attempt can come.
            self._let_go[key] = task or asyncio.ensure_future(self._delete_unless_adopted(*key))

    async def open(self) -> None:
        try:
            orphans = sum([await self._sweep(namespace) for namespace in self.namespaces])
        except TROUBLE as exc:
            raise SetupError(f"the cluster ({self._cluster}) does not let us work: {exc}") from exc
        log.info("runs Jobs", namespaces=self.namespaces, orphans=orphans)

    async def close(self) -> None:
        await super().close()
        for pods in self._pods.values():
            await pods.close()
        self._pods = {}
        for task in filter(None, self._let_go.values()):
            task.cancel()
        self._let_go = {}
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _sweep(self, namespace: str) -> int:
        """Release the Jobs that dead workers of this machine have left, since an attempt may still adopt them. Return
        how many."""
        orphans = 0
        async for job in self.client.list(Job, namespace=namespace, labels=_MANAGED):  # type: ignore[arg-type]
            notes = (job.metadata and job.metadata.annotations) or {}
            owner, deadline = Owner.parse(notes.get(OWNER, "")), notes.get(DEADLINE, "")
            if owner is None or not deadline.isdecimal():
                continue
            if is_orphan(owner, int(deadline), here=self.owner, now=time.time()):
                self.let_go(namespace, str(job.metadata and job.metadata.name), label_of(job, FENCE))
                orphans += 1
        return orphans

    async def _delete_unless_adopted(self, namespace: str, name: str, fence: str) -> None:
        await asyncio.sleep(_ADOPTED_WITHIN)
        async for _ in pauses():
            with contextlib.suppress(*TROUBLE):
                job = await self.client.job(name, namespace)
                if job is None or label_of(job, FENCE) != fence or await self.client.remove(job):
                    del self._let_go[namespace, name, fence]
                    return


class _Job(Remote):
    """One attempt's Job."""

    def __init__(self, executor: KubernetesExecutor, attempt: Attempt) -> None:
        super().__init__(executor, attempt)
        self._cluster = executor
        self._target: KubernetesTarget = attempt.target
        self._namespace = self._target.namespace or executor.namespaces[0]
        self._name = f"tocsin-{attempt.run.run_id}"
        self.key = (attempt.run.run_id, str(attempt.run.fence))
        self._pod: Pod | None = None
        self._news = asyncio.Event()
        self._pod_over = asyncio.Event()

    async def execute(self) -> Exit:
        if refused := self._refusal():
            return Exit(error_class="start", message=refused)
        if wrong := overlong(environment(self.attempt, self._cluster.url)):
            return Exit(error_class="arguments", message=wrong)
        pods = self._cluster.pods(self._namespace)
        pods.follow(self)
        try:
            made = await self._create()
            if made is not None:
                await self._release(made)
            return await self._follow()
        except _NameTaken:
            return Exit(error_class="start", message=f"there is a Job {self._name} which is not ours")
        except HTTPStatusError as exc:
            return Exit(error_class="engine" if code_of(exc) >= 500 else "start", message=words_of(exc))
        except TROUBLE as exc:
            return Exit(error_class="engine", message=f"the cluster does not answer: {exc!r}")
        finally:
            pods.leave(self)

    async def ask(self) -> None:
        with contextlib.suppress(*TROUBLE):  # then it is asked again, with less patience
            while (job := await self._mine()) is not None:
                if await self._cluster.client.remove(job):
                    return

    async def remove(self) -> None:
        has_ended = self._pod is not None and is_over(self._pod)
        async for _ in pauses():
            try:
                job = await self._mine()
                if job is None:
                    return
                if not await self._cluster.client.remove(job, wait_for_pods=not has_ended):
                    continue
                if has_ended:
                    return
                await self._hurry()
                await self._deletion_of(job)
            except TROUBLE as exc:
                log.warning("a Job cannot be deleted yet", name=self._name, why=str(exc))
                if has_ended:  # what is left of it goes by itself
                    return

    def let_go(self) -> bool:
        if self._pod is None or not can_be_adopted(self._pod):
            return False
        self._cluster.let_go(self._namespace, self._name, str(self.attempt.run.fence))
        return True

    def waits_for(self) -> str:
        return waits_for(self._pod)

    def saw(self, pod: Pod) -> None:
        """The cluster tells how its pod is."""
        self._pod = pod
        if is_over(pod):
            self._pod_over.set()
        self._news.set()

    def misses_its_pod(self) -> None:
        """The cluster has no such pod: not yet, or not any more."""
        if self._pod is not None:
            self._pod_over.set()
            self._news.set()

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refusal(self) -> str:
        """Why this worker may not run it: who writes a job document must not choose whose rights it has."""
        account = self._target.service_account
        if self._namespace not in self._cluster.namespaces:
            return f"this worker may not run jobs in the namespace {self._namespace}"
        if account is not None and account not in self._cluster.service_accounts:
            return f"this worker may not run jobs as the service account {account}"
        return ""

    async def _create(self) -> Job | None:
        """A Job that does not run yet, alone in its place; none if there was one that could be adopted."""
        async for _ in pauses():
            try:
                document: Any = Job.from_dict(self._document())
                made: Job = await whole(self._cluster.client.create(document))
                return made
            except HTTPStatusError as exc:
                if code_of(exc) != 409:
                    raise
            found = await self._cluster.client.job(self._name, self._namespace)
            if found is None:
                continue
            if label_of(found, RUN) != self.attempt.run.run_id:
                raise _NameTaken
            if int(label_of(found, FENCE)) > self.attempt.run.fence:
                raise Superseded
            if await self._would_do_the_same(found):
                if await whole(self._adopt(found)):
                    return None
            elif await self._cluster.client.remove(found):
                await self._deletion_of(found)
        raise AssertionError

    async def _would_do_the_same(self, job: Job) -> bool:
        """Whether this attempt may as well go on with an earlier one's Job."""
        assert job.metadata is not None
        same = (job.metadata.annotations or {}).get(WORK) == self._work
        if not same or job.metadata.deletionTimestamp is not None:
            return False
        pods = await self._cluster.client.pods_of(job)
        return len(pods) == 1 and can_be_adopted(pods[0])

    async def _adopt(self, job: Job) -> bool:
        """Make it this attempt's; False if it has changed meanwhile. From here on its old worker, should it be alive,
        neither deletes it nor is heard. First the Job, which decides whose it is: after whoever dies in between comes
        an attempt that adopts both."""
        client, labels = self._cluster.client, {**self._cluster.labels, FENCE: str(self.attempt.run.fence)}
        mine = await client.adopt(job, {"labels": labels, "annotations": {OWNER: str(self._cluster.owner)}})
        if mine is None:
            return False
        self.begun = True
        adopted: Pod | None = None
        while adopted is None:
            match await client.pods_of(mine):
                case [pod]:
                    adopted = await client.adopt(pod, {"labels": labels})
                case _:
                    return False
        assert mine.metadata is not None and mine.metadata.annotations is not None
        ends = int(mine.metadata.annotations[DEADLINE]) - STOP_GRACE - _BEYOND_TIMEOUT
        self.times_out_in(max(ends - time.time(), 0.0))
        self.note("an earlier attempt lost its worker; this one goes on with its Job and tells all of its output")
        self.saw(adopted)
        return True

    async def _release(self, job: Job) -> None:
        """Give it its environment and let it run. The environment has secrets, so it is none of the Job's own fields;
        it belongs to the Job, so it goes with it, whoever deletes that."""
        assert job.metadata is not None
        env = environment(self.attempt, self._cluster.url)
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self._name, "uid": job.metadata.uid}
        secret = {
            "metadata": {
                "name": self._secret,
                "namespace": self._namespace,
                "labels": self._cluster.labels,
                "ownerReferences": [owner],
            },
            "stringData": env,
        }
        made: Any = Secret.from_dict(secret)
        await self._cluster.client.create(made)
        self.begun = True
        start = {"spec": {"suspend": False}}
        await self._cluster.client.patch(Job, self._name, start, namespace=self._namespace, patch_type=PatchType.MERGE)

    @property
    def _secret(self) -> str:
        return f"{self._name}-{self.attempt.run.fence}"

    @property
    def _work(self) -> str:
        """What is to be done, in short: a run that is tried again by hand may be another by now. No value of its
        environment is in it, for some are secret and easily guessed."""
        target, resources = self._target, self.attempt.resources
        told = repr((target.image, target.command, target.service_account, sorted(target.env), quantities(resources)))
        return hashlib.sha256(told.encode()).hexdigest()[:40]

    def _document(self) -> dict[str, Any]:
        run = self.attempt.run
        labels = {**self._cluster.labels, RUN: run.run_id, FENCE: str(run.fence)}
        lasts = run.timeout_ms / 1000 + STOP_GRACE + _BEYOND_TIMEOUT
        notes = {OWNER: str(self._cluster.owner), DEADLINE: f"{time.time() + lasts:.0f}", WORK: self._work}
        return {
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "labels": labels,
                "annotations": notes,
            },
            "spec": {
                "suspend": True,
                "backoffLimit": 0,  # Tocsin tries again, not Kubernetes
                "completions": 1,
                "parallelism": 1,
                "podReplacementPolicy": "Failed",
                "activeDeadlineSeconds": math.ceil(lasts),
                "ttlSecondsAfterFinished": _KEPT_AFTER,
                "template": {"metadata": {"labels": labels}, "spec": self._pod_document()},
            },
        }

    def _pod_document(self) -> dict[str, Any]:
        target = self._target
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": target.image,
            "imagePullPolicy": _PULL[target.pull],
            "envFrom": [{"secretRef": {"name": self._secret}}],
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        if target.command:
            # The cluster would put variables in the place of their names.
            container["command"] = [word.replace("$", "$$") for word in target.command]
        if wanted := quantities(self.attempt.resources):
            container["resources"] = {"requests": wanted, "limits": wanted}
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": max(1, round(STOP_GRACE)),
            "enableServiceLinks": False,
            "automountServiceAccountToken": target.service_account is not None,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        }
        if target.service_account is not None:
            pod["serviceAccountName"] = target.service_account
        return pod

    # ── run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self) -> Exit:
        copy: asyncio.Task[None] | None = None
        try:
            while (exit_ := self._exit()) is None:
                if self._pod is not None:
                    copy = copy or self._copy_of(self._pod)
                self._news.clear()
                await self._news.wait()
            if self._pod is not None:
                self.enforced = enforced(self.attempt.resources, self._pod)
                copy = copy or self._copy_of(self._pod)
            if copy is not None:
                await asyncio.wait({copy}, timeout=_LAST_OUTPUT)
            return exit_
        finally:
            if copy is not None:
                copy.cancel()

    def _exit(self) -> Exit | None:
        if self._pod is None:
            return None
        exit_ = exit_of(self._pod)
        if exit_ is None and self._pod_over.is_set():
            return Exit(error_class="evicted", message="its pod was deleted by somebody else")
        return exit_

    def _copy_of(self, pod: Pod) -> asyncio.Task[None] | None:
        """Begin to read what it writes, once there may be something."""
        if not has_output(pod) or pod.metadata is None or pod.metadata.name is None:
            return None
        return asyncio.ensure_future(self._copy(pod.metadata.name))

    async def _copy(self, pod: str) -> None:
        since: int | None = None
        async for _ in pauses():
            last = time.monotonic()
            try:
                async for data in self._cluster.client.output(pod, self._namespace, since):
                    last = time.monotonic()
                    self.output("stdout", data)  # a pod's streams are one
            except TROUBLE as exc:
                log.info("the output of a pod broke off", pod=pod, why=str(exc))
            # The output may end a moment before the pod's end is told; but also by itself, as when a kubelet restarts.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_IS_TOLD_WITHIN):
                    await self._pod_over.wait()
                return
            since = math.ceil(time.monotonic() - last) + 1
            self.note("the output broke off here; lines may be missing or double")

    # ── end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _mine(self) -> Job | None:
        """The Job, unless it is gone or another attempt's."""
        found = await self._cluster.client.job(self._name, self._namespace)
        return found if found is not None and label_of(found, FENCE) == str(self.attempt.run.fence) else None

    async def _hurry(self) -> None:
        """It has had its time: kill its pod. Not at once (0), for then the cluster would forget it without proof."""
        if self._pod is not None and self._pod.metadata is not None and self._pod.metadata.name is not None:
            try:
                name = self._pod.metadata.name
                await self._cluster.client.delete(Pod, name, namespace=self._namespace, grace_period=1)
            except HTTPStatusError as exc:
                if code_of(exc) != 404:
                    raise

    async def _deletion_of(self, job: Job) -> None:
        """Until the cluster says that it is gone, or for as long as it can be heard: then one has to look again."""
        assert job.metadata is not None
        watch = self._cluster.client.watch(
            Job,
            namespace=self._namespace,
            fields={"metadata.name": self._name},
            resource_version=job.metadata.resourceVersion,
        )
        with contextlib.suppress(*TROUBLE):
            async with asyncio.timeout(LOOK_ANEW):
                async for change, _ in watch:
                    if change == "DELETED":
                        return


class _NameTaken(Exception):
    """There is a Job of that name which is none of ours."""
