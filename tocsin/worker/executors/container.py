"""Target `container`: an image, run by Docker or podman through the Docker Engine API.

A container is named after its run, so an engine never has two attempts of one run: an earlier one is in the way of a
later one, which removes it. Labels tell whose it is, by run, fence and worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiodocker import Docker, DockerError
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream

from tocsin.errors import SetupError
from tocsin.telemetry import get_logger
from tocsin.worker.executors import STOP_GRACE, Attempt, environment, overlong
from tocsin.worker.executors.groups import Group, enforced, group_of
from tocsin.worker.executors.remote import (
    LAST_OUTPUT,
    Exit,
    Remote,
    RemoteExecutor,
    Superseded,
    exit_by_code,
    out_of_memory,
    pauses,
    whole,
)
from tocsin.worker.owner import Owner, is_orphan
from tocsin.worker.strays import LABEL
from tocsin.worker.targets import NO_RESOURCES, ContainerTarget

log = get_logger("worker")

RUN, FENCE, OWNER, DEADLINE = "tocsin.run", "tocsin.fence", LABEL, "tocsin.deadline"
_ANSWER_WITHIN = aiohttp.ClientTimeout(total=60, sock_connect=5)
_TROUBLE = (DockerError, aiohttp.ClientError, OSError, TimeoutError)
_UNREACHABLE = 900  # aiodocker's status for an engine that does not answer
_PROCESSES = 4096
_NEEDLESS = ["AUDIT_WRITE", "MKNOD", "NET_RAW"]  # what images hardly ever need and attackers like
_MB = 1024 * 1024


class ContainerExecutor(RemoteExecutor):
    """The containers of one worker."""

    kind = "container"

    def __init__(self, engine: str, url: str) -> None:
        super().__init__()
        scheme, _, self._socket = engine.partition("://")
        if scheme != "unix" or not self._socket.startswith("/"):
            raise SetupError(f"container_engine must be a socket, as in unix:///run/docker.sock, not {engine}")
        self.url = url
        self.owner = Owner.here()
        self._docker: Docker | None = None

    @property
    def docker(self) -> Docker:
        """The engine. Without a limit to its connections: each container takes two, and a stop must get through."""
        if self._docker is None:
            connector = aiohttp.UnixConnector(self._socket, limit=0)
            self._docker = Docker("unix://localhost", connector=connector, timeout=_ANSWER_WITHIN)
        return self._docker

    def remote(self, attempt: Attempt) -> Remote:
        return _Container(self, attempt)

    async def open(self) -> None:
        try:
            removed = await self._sweep()
        except _TROUBLE as exc:
            raise SetupError(f"the container engine at {self._socket} does not work: {exc}") from exc
        log.info("runs containers", engine=self._socket, orphans_removed=removed)

    async def close(self) -> None:
        await super().close()
        if self._docker is not None:
            docker, self._docker = self._docker, None
            await docker.close()
            await docker.connector.close()

    async def _sweep(self) -> int:
        """Remove what workers of this machine that are no more have left."""
        filters = json.dumps({"label": [OWNER]})
        removed = 0
        for found in await self.docker.containers.list(all="true", filters=filters):
            if self._is_orphan(found["Labels"], found["Names"]):
                with contextlib.suppress(DockerError):  # somebody else sweeps, too
                    await found.delete(force=True, v=True)
                    removed += 1
        return removed

    def _is_orphan(self, labels: dict[str, str], names: list[str]) -> bool:
        owner, deadline = Owner.parse(labels[OWNER]), labels.get(DEADLINE, "")
        # A label may also come from an image that somebody else runs; a name does not.
        is_ours = f"/tocsin-{labels.get(RUN)}" in names and deadline.isdecimal()
        return is_ours and owner is not None and is_orphan(owner, int(deadline), here=self.owner, now=time.time())


class _Container(Remote):
    """One attempt's container."""

    def __init__(self, executor: ContainerExecutor, attempt: Attempt) -> None:
        super().__init__(executor, attempt)
        self._engine = executor
        self._target: ContainerTarget = attempt.target
        self._name = f"tocsin-{attempt.run.run_id}"
        self._container: DockerContainer | None = None
        self._pulls = False
        self._group: Group | None = None
        self._kills: int | None = 0

    async def execute(self) -> Exit:
        if wrong := overlong(environment(self.attempt, self._engine.url)):
            return Exit(error_class="arguments", message=wrong)
        try:
            self._container = container = await self._create()
            # Attached before it starts, so that its first line is not missed.
            async with _attached(container) as output:
                self.begun = True
                # podman has made its process by now; Docker makes it at the start.
                await self._look_at_limits(container)
                await container.start()
                return await self._follow(container, output)
        except _NoImage as exc:
            return Exit(error_class="image", message=f"{self._target.image}: {exc}")
        except DockerError as exc:
            return Exit(error_class="engine" if exc.status == _UNREACHABLE else "start", message=exc.message)
        except (aiohttp.ClientError, OSError, TimeoutError) as exc:
            return Exit(error_class="engine", message=f"the container engine does not answer: {exc!r}")

    async def ask(self) -> None:
        if self._container is not None:
            with contextlib.suppress(*_TROUBLE):  # then it is killed
                await self._container.kill(signal="SIGTERM")

    async def remove(self) -> None:
        async for _ in pauses():
            try:
                found = await self._named()
                if found is None or found["Config"]["Labels"].get(FENCE) != str(self.attempt.run.fence):
                    return
                await found.delete(force=True, v=True)
            except _TROUBLE as exc:
                log.warning("a container cannot be removed yet", name=self._name, why=str(exc))

    def waits_for(self) -> str:
        return "its image is being pulled" if self._pulls else ""

    # ── start ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _create(self) -> DockerContainer:
        may_pull = self._target.pull == "missing"
        if self._target.pull == "always":
            await self._pull()
        while True:
            try:
                return await whole(self._engine.docker.containers.create(self._config(), name=self._name))
            except DockerError as exc:
                if exc.status != 404:
                    if not await self._made_way():
                        raise
                elif may_pull:
                    may_pull = False
                    await self._pull()
                else:
                    raise _NoImage(exc.message) from exc

    async def _pull(self) -> None:
        self._pulls = True
        try:
            await self._engine.docker.images.pull(self._target.image)
        except DockerError as exc:
            if exc.status == _UNREACHABLE:
                raise
            raise _NoImage(exc.message) from exc
        self._pulls = False

    async def _made_way(self) -> bool:
        """Remove an earlier attempt that has our name; False if that is not why no container could be made."""
        found = await self._named()
        labels = {} if found is None else found["Config"]["Labels"]
        if found is None or labels.get(RUN) != self.attempt.run.run_id:
            return False
        if int(labels[FENCE]) > self.attempt.run.fence:
            raise Superseded
        await found.delete(force=True, v=True)
        return True

    async def _named(self) -> DockerContainer | None:
        try:
            return await self._engine.docker.containers.get(self._name)
        except DockerError as exc:
            if exc.status == 404:
                return None
            raise

    def _config(self) -> dict[str, Any]:
        run, target, wants = self.attempt.run, self._target, self.attempt.resources
        env = environment(self.attempt, self._engine.url)
        host: dict[str, Any] = {
            "NetworkMode": target.network,
            "PidsLimit": _PROCESSES,
            "CapDrop": _NEEDLESS,
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "none"},  # we have the output; the engine need not fill a disk with it
        }
        if wants.memory_mb:
            host["Memory"] = host["MemorySwap"] = wants.memory_mb * _MB
        if wants.cpu:
            host["NanoCpus"] = int(wants.cpu * 1e9)
        if wants.gpus:
            host["DeviceRequests"] = [{"Driver": "nvidia", "Count": wants.gpus, "Capabilities": [["gpu"]]}]
        config: dict[str, Any] = {
            "Image": target.image,
            "Env": [f"{name}={value}" for name, value in env.items()],
            "Labels": {
                RUN: run.run_id,
                FENCE: str(run.fence),
                OWNER: str(self._engine.owner),
                DEADLINE: f"{time.time() + run.timeout_ms / 1000 + STOP_GRACE:.0f}",
            },
            "AttachStdout": True,
            "AttachStderr": True,
            "HostConfig": host,
        }
        if target.command:
            config |= {"Entrypoint": target.command[:1], "Cmd": target.command[1:]}
        return config

    # ── run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self, container: DockerContainer, output: Stream) -> Exit:
        copy = asyncio.ensure_future(self._copy(output))
        try:
            await self._look_at_limits(container)
            exit_ = await self._exit(container)
            await asyncio.wait({copy}, timeout=LAST_OUTPUT)
            return exit_
        finally:
            copy.cancel()

    async def _look_at_limits(self, container: DockerContainer) -> None:
        """See whether they are held, unless that has been seen."""
        asked = self.attempt.resources
        if asked != NO_RESOURCES and not self._group:
            with contextlib.suppress(*_TROUBLE):
                inspected = await container.show()
                self._group = group_of(inspected)
                self.enforced = enforced(asked, self._group, inspected)

    async def _copy(self, output: Stream) -> None:
        try:
            while (message := await output.read_out()) is not None:
                self.output("stderr" if message.stream == 2 else "stdout", message.data)
        except _TROUBLE as exc:
            self.note(f"the rest of the output is lost: {exc}")
        # Its output ends with it, and a moment later its group is gone.
        if self._group and self.enforced.get("memory_mb"):
            self._kills = self._group.kills

    async def _exit(self, container: DockerContainer) -> Exit:
        """Wait for its end. The engine may be restarted meanwhile: the container may live through that or not."""
        async for _ in pauses():
            try:
                await container.wait()
                state = (await container.show())["State"]
                if not state["Running"]:
                    return self._verdict(state)
            except DockerError as exc:
                if exc.status == 404:
                    return Exit(error_class="engine", message="its container was removed by somebody else")
                log.warning("the container engine does not answer", why=exc.message)
            except _TROUBLE as exc:
                log.warning("the container engine does not answer", why=repr(exc))
        raise AssertionError

    def _verdict(self, state: dict[str, Any]) -> Exit:
        code = int(state["ExitCode"])
        # A program may also do without a process of its that was killed, and end well.
        if code and (state.get("OOMKilled") or self._kills):
            return out_of_memory(code)
        if code == 128 + signal.SIGKILL and self._kills is None:
            return Exit(code, "oom", "killed by SIGKILL, most likely because it used more memory than it was given")
        return exit_by_code(code)


@contextlib.asynccontextmanager
async def _attached(container: DockerContainer) -> AsyncIterator[Stream]:
    output = container.attach(stdout=True, stderr=True)
    await output.__aenter__()
    try:
        yield output
    finally:
        with contextlib.suppress(AssertionError, *_TROUBLE):  # aiodocker insists on a connection that may be gone
            await output.close()


class _NoImage(Exception):
    """There is no such image here, and it cannot be had."""
