"""A cluster of our own: the few routes of the Kubernetes API that the executor uses, with watches, over real HTTP; and
behind them a node whose pods are processes of this machine. It is no Kubernetes: what it does was written down from the
API's documentation, so a test that passes here shows that we keep to that, not that a cluster does.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from tests import PATIENCE

Thing = dict[str, Any]


class Pod:
    """A pod and the process in it."""

    def __init__(self, thing: Thing) -> None:
        self.thing = thing
        self.log = bytearray()
        self.closed = False  # nothing more will be written
        self.process: asyncio.subprocess.Process | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return str(self.thing["metadata"]["name"])

    def container(self, **state: Any) -> None:
        self.thing["status"]["containerStatuses"] = [{"name": "job", "state": state, **_REQUIRED}]


_REQUIRED = {"image": "", "imageID": "", "ready": False, "restartCount": 0}


class Cluster:
    """`scripts`: what becomes of the pods of an image, instead of running its command. `faults`: answers to give
    instead, in order, as (method, part of the path, status)."""

    def __init__(self) -> None:
        self.jobs: dict[str, Thing] = {}
        self.pods: dict[str, Pod] = {}
        self.secrets: dict[str, Thing] = {}
        self.scripts: dict[str, Callable[[Pod], None]] = {"missing": _cannot_pull}
        self.faults: list[tuple[str, str, int]] = []
        self.requests: list[tuple[str, str]] = []
        self.held: set[str] = set()  # names of Jobs whose pods do not go
        self.oldest = 0  # changes before this version are forgotten
        self.cut = asyncio.Event()  # when set, every open stream breaks once
        self._changes: list[tuple[int, str, str, Thing]] = []
        self._numbers = itertools.count(1)
        self._version = 0
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Cluster:
        app = web.Application(middlewares=[self._watched])
        jobs, pods = "/apis/batch/v1/namespaces/{ns}/jobs", "/api/v1/namespaces/{ns}/pods"
        app.router.add_post(jobs, self._create_job)
        app.router.add_get(jobs, self._list_jobs)
        app.router.add_get(jobs + "/{name}", self._get_job)
        app.router.add_patch(jobs + "/{name}", self._patch_job)
        app.router.add_delete(jobs + "/{name}", self._delete_job)
        app.router.add_post("/api/v1/namespaces/{ns}/secrets", self._create_secret)
        app.router.add_get(pods, self._list_pods)
        app.router.add_patch(pods + "/{name}", self._patch_pod)
        app.router.add_delete(pods + "/{name}", self._delete_pod)
        app.router.add_get(pods + "/{name}/log", self._log)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        for pod in self.pods.values():
            _signal(pod, signal.SIGKILL)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path) -> str:
        """A file that leads here."""
        path = folder / "kubeconfig"
        named = {"name": "here"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{**named, "cluster": {"server": self.url}}],
            "users": [{**named, "user": {"token": "the-token"}}],
            "contexts": [{**named, "context": {"cluster": "here", "user": "here"}}],
        }
        path.write_text(json.dumps(config))
        return str(path)

    async def until(self, condition: Callable[[], Any], within: float = PATIENCE) -> Any:
        """Wait until the condition holds, looking again at every change."""
        async with asyncio.timeout(within), self._changed:
            await self._changed.wait_for(condition)
            return condition()

    async def update(self, pod: Pod) -> None:
        """A pod's status has changed."""
        await self._tell("Pod", "MODIFIED", pod.thing)

    async def break_streams(self) -> None:
        """Cut every watch and log that is open."""
        self.cut.set()
        async with self._changed:
            self._changed.notify_all()
        self.cut = asyncio.Event()

    # ── the API ──────────────────────────────────────────────────────────────────────────────────────────────────

    @web.middleware
    async def _watched(self, request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer the-token"
        self.requests.append((request.method, request.path))
        for fault in self.faults:
            method, part, status = fault
            if method == request.method and part in request.path:
                self.faults.remove(fault)
                return _status(status, "a fault of the test")
        try:
            answer: web.StreamResponse = await handler(request)
        except ConnectionResetError:  # whoever watched has gone
            return web.Response()
        return answer

    async def _create_job(self, request: web.Request) -> web.Response:
        thing: Thing = await request.json()
        name = thing["metadata"]["name"]
        if name in self.jobs:
            return _status(409, f"jobs.batch {name!r} already exists")
        thing["metadata"]["uid"] = f"uid-{next(self._numbers)}"
        self.jobs[name] = thing
        await self._tell("Job", "ADDED", thing)
        return _json(thing, status=201)

    async def _get_job(self, request: web.Request) -> web.Response:
        found = self.jobs.get(request.match_info["name"])
        return _status(404, "not found") if found is None else _json(found)

    async def _patch_job(self, request: web.Request) -> web.Response:
        found = self.jobs.get(request.match_info["name"])
        if found is None:
            return _status(404, "not found")
        if await request.json() != {"spec": {"suspend": False}}:
            return await self._patch_metadata(request, "Job", found)
        assert request.content_type == "application/merge-patch+json"
        found["spec"]["suspend"] = False
        await self._tell("Job", "MODIFIED", found)
        self._do(self._make_pod(found))
        return _json(found)

    async def _patch_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        return _status(404, "not found") if pod is None else await self._patch_metadata(request, "Pod", pod.thing)

    async def _patch_metadata(self, request: web.Request, kind: str, found: Thing) -> web.Response:
        assert request.content_type == "application/merge-patch+json"
        (change,) = (await request.json()).values()
        if change.pop("resourceVersion") != found["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified")
        for name, values in change.items():
            assert name in ("labels", "annotations")
            found["metadata"][name] = found["metadata"].get(name, {}) | values
        await self._tell(kind, "MODIFIED", found)
        return _json(found)

    async def _delete_job(self, request: web.Request) -> web.Response:
        found = self.jobs.get(request.match_info["name"])
        if found is None:
            return _status(404, "not found")
        options = await request.json()
        if any(found["metadata"][name] != value for name, value in options["preconditions"].items()):
            return _status(409, "a precondition does not hold")
        if "deletionTimestamp" not in found["metadata"]:
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._do(self._collect(found))
        return _json(found)

    async def _create_secret(self, request: web.Request) -> web.Response:
        thing: Thing = await request.json()
        assert thing["metadata"]["ownerReferences"][0]["uid"] in [job["metadata"]["uid"] for job in self.jobs.values()]
        self.secrets[thing["metadata"]["name"]] = thing
        return _json(thing, status=201)

    async def _delete_pod(self, request: web.Request) -> web.Response:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "not found")
        assert int(request.query["gracePeriodSeconds"]) > 0, "no proof"
        self._do(self._end_pod(pod, grace=0.05))
        return _json(pod.thing)

    async def _list_jobs(self, request: web.Request) -> web.StreamResponse:
        return await self._list(request, "Job")

    async def _list_pods(self, request: web.Request) -> web.StreamResponse:
        return await self._list(request, "Pod")

    async def _list(self, request: web.Request, kind: str) -> web.StreamResponse:
        if request.query.get("watch") == "true":
            return await self._watch(request, kind)
        things = list(self.jobs.values()) if kind == "Job" else [pod.thing for pod in self.pods.values()]
        found = [thing for thing in things if _matches(thing, request)]
        return _json({"metadata": {"resourceVersion": str(self._version)}, "items": found})

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since, cut = int(request.query["resourceVersion"]), self.cut
        if since < self.oldest:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
            await response.write(json.dumps(gone).encode() + b"\n")
            return response
        sent = 0
        while not cut.is_set():
            news = self._changes[sent:]
            sent += len(news)  # those that come while these are written are the next ones
            for version, of_kind, change, thing in news:
                if version > since and of_kind == kind and _matches(thing, request):
                    await response.write(json.dumps({"type": change, "object": thing}).encode() + b"\n")
            async with self._changed:
                await self._changed.wait_for(lambda: len(self._changes) > sent or cut.is_set())  # noqa: B023
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _log(self, request: web.Request) -> web.StreamResponse:
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _status(404, "not found")
        assert request.query["container"] == "job" and request.query["follow"] == "true"
        response = web.StreamResponse()
        await response.prepare(request)
        sent, cut = 0, self.cut
        while not cut.is_set():
            while sent < len(pod.log):
                part = bytes(pod.log[sent : sent + 65536])
                await response.write(part)
                sent += len(part)
            if pod.closed:
                return response
            async with self._changed:
                await self._changed.wait_for(lambda: len(pod.log) > sent or pod.closed or cut.is_set())  # noqa: B023
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _tell(self, kind: str, change: str, thing: Thing) -> None:
        self._version = next(self._numbers)
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._changes.append((self._version, kind, change, copy.deepcopy(thing)))
        async with self._changed:
            self._changed.notify_all()

    def _do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ── the Job controller, the garbage collector, the kubelet ───────────────────────────────────────────────────

    async def _make_pod(self, job: Thing) -> None:
        template = job["spec"]["template"]
        metadata = {
            **copy.deepcopy(template["metadata"]),
            "name": f"{job['metadata']['name']}-{next(self._numbers)}",
            "namespace": job["metadata"]["namespace"],
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": job["metadata"]["name"],
                    "uid": job["metadata"]["uid"],
                }
            ],
        }
        pod = Pod({"metadata": metadata, "spec": template["spec"], "status": {"phase": "Pending"}})
        self.pods[pod.name] = pod
        await self._tell("Pod", "ADDED", pod.thing)
        script = self.scripts.get(template["spec"]["containers"][0]["image"])
        if script is not None:
            script(pod)
            await self.update(pod)
        else:
            pod.task = asyncio.ensure_future(self._run(pod))
            self._tasks.add(pod.task)

    async def _run(self, pod: Pod) -> None:
        container = pod.thing["spec"]["containers"][0]
        env = self.secrets[container["envFrom"][0]["secretRef"]["name"]]["stringData"]
        try:
            pod.process = process = await asyncio.create_subprocess_exec(
                *(_expanded(word, env) for word in container["command"]),
                env={**env, "PATH": os.environ["PATH"]},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            await self._terminated(pod, exitCode=128, reason="StartError", message=str(exc))
            return
        pod.thing["status"]["phase"] = "Running"
        pod.container(running={})
        await self.update(pod)
        killed = asyncio.ensure_future(_out_of_memory(process.pid, container)) if "resources" in container else None
        assert process.stdout is not None
        while data := await process.stdout.read(65536):
            pod.log += data
            async with self._changed:
                self._changed.notify_all()
        code = await process.wait()
        reason = "OOMKilled" if killed and killed.done() else "Completed" if code == 0 else "Error"
        if killed:
            killed.cancel()
        await self._terminated(pod, exitCode=code if code >= 0 else 128 - code, reason=reason)

    async def _terminated(self, pod: Pod, **state: Any) -> None:
        pod.closed = True
        pod.container(terminated=state)
        pod.thing["status"]["phase"] = "Succeeded" if state["exitCode"] == 0 else "Failed"
        await self.update(pod)

    async def _end_pod(self, pod: Pod, grace: float | None = None) -> None:
        if pod.process is not None and not pod.closed:
            _signal(pod, signal.SIGTERM)
            patience = grace if grace is not None else pod.thing["spec"]["terminationGracePeriodSeconds"]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(pod.process.wait(), patience)
            _signal(pod, signal.SIGKILL)
        if pod.task is not None:
            await asyncio.wait({pod.task})
        if self.pods.pop(pod.name, None) is not None:
            await self._tell("Pod", "DELETED", pod.thing)

    async def _collect(self, job: Thing) -> None:
        """Delete a Job in the foreground: first what it owns."""
        owner, name = job["metadata"]["uid"], job["metadata"]["name"]
        await self.until(lambda: name not in self.held, 600)
        mine = [pod for pod in self.pods.values() if pod.thing["metadata"]["ownerReferences"][0]["uid"] == owner]
        await asyncio.gather(*map(self._end_pod, mine))
        self.secrets = {
            key: secret
            for key, secret in self.secrets.items()
            if secret["metadata"]["ownerReferences"][0]["uid"] != owner
        }
        if self.jobs.get(name) is job:
            del self.jobs[name]
        await self._tell("Job", "DELETED", job)


def _expanded(word: str, env: dict[str, str]) -> str:
    """`$(NAME)` stands for a variable that there is, `$$` for a dollar; anything else for itself. Values that come
    from a Secret are taken as they are."""
    stands_for = lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0])  # noqa: E731
    return re.sub(r"\$\$|\$\(([^)]*)\)", stands_for, word)


def _cannot_pull(pod: Pod) -> None:
    pod.container(waiting={"reason": "ImagePullBackOff", "message": 'Back-off pulling image "missing"'})


async def _out_of_memory(pid: int, container: Thing) -> None:
    """Returns when the process was killed for its memory."""
    most = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.memory_info().rss <= most:  # noqa: ASYNC110 (nobody would set an event)
            await asyncio.sleep(0.005)
        process.kill()
        return
    await asyncio.Event().wait()


def _signal(pod: Pod, number: int) -> None:
    # A shell may have gone before what it has forked, as it does if the request to end comes at that moment.
    if pod.process is not None and not pod.closed:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pod.process.pid, number)


def _matches(thing: Thing, request: web.Request) -> bool:
    labels = thing["metadata"].get("labels", {})
    wanted = [pair.split("=", 1) for pair in request.query.get("labelSelector", "").split(",") if pair]
    field = request.query.get("fieldSelector", "").partition("=")[2].lstrip("=")
    in_place = thing["metadata"]["namespace"] == request.match_info["ns"]
    return in_place and all(labels.get(k) == v for k, v in wanted) and field in ("", thing["metadata"]["name"])


def _json(thing: Thing, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(thing).encode(), status=status, headers={"Content-Type": "application/json"})


def _status(code: int, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return _json(body, status=code)
