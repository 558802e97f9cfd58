"""The API of a Kubernetes cluster as the executor needs it: what lightkube has, what it lacks, a watch of all pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, ConfigError, KubeConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod, PodLog
from lightkube.types import PatchType

from tocsin.errors import SetupError
from tocsin.telemetry import get_logger
from tocsin.worker.executors.podstate import CONTAINER

log = get_logger("worker")

IN_CLUSTER = "in-cluster"
RUN, FENCE = "tocsin.dev/run", "tocsin.dev/fence"
TROUBLE = (httpx2.HTTPError, msgspec.MsgspecError, ConfigError, OSError, TimeoutError)
LOOK_ANEW = 60.0  # a watch whose connection is dead, unknown to us, is given up after so long

_Thing = TypeVar("_Thing", Job, Pod)
_ANSWER_WITHIN = httpx2.Timeout(30.0, connect=5.0)
_AFTER_TROUBLE = 1.0


class Cluster(AsyncClient):
    """The cluster's API, with what lightkube lacks."""

    async def remove(self, job: Job, *, wait_for_pods: bool = True) -> bool:
        """Delete this very Job, not one that has its name by now, nor one that another attempt has adopted: False if it
        has changed since it was read. It stays until its pods are gone, if so wished."""
        assert job.metadata is not None
        raw: Any = self._client
        request = raw.prepare_request("delete", Job, name=job.metadata.name, namespace=job.metadata.namespace)
        request.data = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Foreground" if wait_for_pods else "Background",
            "preconditions": {"uid": job.metadata.uid, "resourceVersion": job.metadata.resourceVersion},
        }
        response = await raw.send(raw.build_adapter_request(request))
        if response.status_code not in (404, 409):  # there is none, or it is another
            raw.raise_for_status(response)
        return bool(response.status_code != 409)

    async def job(self, name: str, namespace: str) -> Job | None:
        """The Job of that name, if there is one."""
        try:
            return await self.get(Job, name, namespace=namespace)
        except httpx2.HTTPStatusError as exc:
            if code_of(exc) == 404:
                return None
            raise

    async def pods_of(self, job: Job) -> list[Pod]:
        """What the Job has made."""
        assert job.metadata is not None and job.metadata.namespace is not None
        labels: Any = {RUN: label_of(job, RUN)}
        found = self.list(Pod, namespace=job.metadata.namespace, labels=labels)
        return [pod async for pod in found if _owner_of(pod) == job.metadata.uid]

    async def adopt(self, found: _Thing, metadata: dict[str, Any]) -> _Thing | None:
        """Write other labels and annotations on it; None if it has changed since it was read."""
        had = found.metadata
        assert had is not None and had.name is not None and had.namespace is not None
        change = {"metadata": {**metadata, "resourceVersion": had.resourceVersion}}
        try:
            return await self.patch(type(found), had.name, change, namespace=had.namespace, patch_type=PatchType.MERGE)
        except httpx2.HTTPStatusError as exc:
            if code_of(exc) in (404, 409):
                return None
            raise

    async def output(self, pod: str, namespace: str, since: int | None) -> AsyncIterator[bytes]:
        """What a pod's container writes, until its end. Bytes, because a line may be longer than our memory."""
        params = {"container": CONTAINER, "follow": "true", "sinceSeconds": since}
        raw: Any = self._client
        request = raw.prepare_request("get", PodLog, name=pod, namespace=namespace, params=params)
        request.timeout = httpx2.Timeout(30.0, connect=5.0, read=None)
        response = await raw.send(raw.build_adapter_request(request), stream=True)
        try:
            if response.is_error:
                await response.aread()
                raw.raise_for_status(response)
            async for data in response.aiter_bytes():
                yield data
        finally:
            await response.aclose()


def connect(cluster: str) -> Cluster:
    """By a kubeconfig file and its current context, or as a pod of the cluster."""
    try:
        found = KubeConfig.from_service_account() if cluster == IN_CLUSTER else KubeConfig.from_file(Path(cluster))
        config = found.get()
        if config is None or config.user is None:
            raise ConfigError("it names no current context, or no user")
        verify = verify_cluster(config.cluster, config.user, config.abs_file)
    except (ConfigError, OSError, ValueError) as exc:
        raise SetupError(f"no way to the cluster ({cluster}): {exc}") from exc
    # No limit to its connections: each run takes one for its output, and a deletion must get through.
    transport = httpx2.AsyncHTTPTransport(verify=verify, limits=httpx2.Limits(max_connections=None))
    return Cluster(config, timeout=_ANSWER_WITHIN, trust_env=False, transport=transport)


class Follower(Protocol):
    """Who wants to know how a pod is."""

    @property
    def key(self) -> tuple[str, str]:
        """Its run and fence."""

    def saw(self, pod: Pod) -> None:
        """The cluster tells how it is."""

    def misses_its_pod(self) -> None:
        """The cluster has no such pod: not yet, or not any more."""


class Pods:
    """The pods of this worker in one namespace: one watch for all of them."""

    def __init__(self, client: Cluster, namespace: str, labels: dict[str, str]) -> None:
        self._client, self._namespace, self._labels = client, namespace, labels
        self._jobs: dict[tuple[str, str], Follower] = {}
        self._task = asyncio.ensure_future(self._watch())

    def follow(self, job: Follower) -> None:
        """Tell the Job of its pod from now on."""
        self._jobs[job.key] = job

    def leave(self, job: Follower) -> None:
        self._jobs.pop(job.key, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _watch(self) -> None:
        while True:
            try:
                version = await self._look()
                async with asyncio.timeout(LOOK_ANEW):
                    await self._listen(version)
            except TimeoutError:
                continue
            except TROUBLE as exc:
                log.warning("the watch of pods broke", namespace=self._namespace, why=str(exc))
                await asyncio.sleep(_AFTER_TROUBLE)
            except Exception:  # without it all runs would wait for their time-out
                log.exception("the watch of pods broke", namespace=self._namespace)
                await asyncio.sleep(_AFTER_TROUBLE)

    async def _look(self) -> str:
        """See which there are; the version from which on changes are to be told."""
        found = self._client.list(Pod, namespace=self._namespace, labels=self._labels)  # type: ignore[arg-type]
        seen = {_key(pod): pod async for pod in found}
        for key, job in list(self._jobs.items()):
            if key in seen:
                job.saw(seen[key])
            else:
                job.misses_its_pod()
        return found.resourceVersion

    async def _listen(self, version: str) -> None:
        watch = self._client.watch(
            Pod,
            namespace=self._namespace,
            labels=self._labels,  # type: ignore[arg-type]
            resource_version=version,
        )
        async for change, pod in watch:
            job = self._jobs.get(_key(pod))
            if job is not None:
                job.saw(pod)
                if change == "DELETED":
                    job.misses_its_pod()


def code_of(exc: httpx2.HTTPStatusError) -> int:
    """The status that the cluster answered with."""
    return exc.response.status_code if exc.response is not None else 500


def words_of(exc: httpx2.HTTPStatusError) -> str:
    """What the cluster said."""
    return (exc.status.message if isinstance(exc, ApiError) else None) or str(exc)


def label_of(found: Job | Pod, name: str) -> str:
    """A label; empty if there is none."""
    labels = found.metadata.labels if found.metadata is not None else None
    return str((labels or {}).get(name, ""))


def _owner_of(pod: Pod) -> str | None:
    owners = pod.metadata.ownerReferences if pod.metadata is not None else None
    return owners[0].uid if owners else None


def _key(pod: Pod) -> tuple[str, str]:
    return label_of(pod, RUN), label_of(pod, FENCE)
