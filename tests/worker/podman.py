"""podman for the tests of containers: its service with a storage of its own, and an image made of busybox alone.

Where a machine has both versions of control groups mounted, crun works only if it does not see the second, so the
service gets a mount namespace of its own without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

import aiohttp
import pytest

from tests import PATIENCE

IMAGE = "localhost/tocsin-test:1"
_BUSYBOX = next((path for path in ("/bin/busybox", "/usr/bin/busybox") if os.path.exists(path)), "")
_CONFIG = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
runtime = "crun"
tmp_dir = "{folder}/tmp"
"""


def missing() -> str:
    """What a machine lacks for these tests; empty if nothing."""
    lacks = [program for program in ("podman", "crun", "conmon", "unshare") if shutil.which(program) is None]
    lacks += [] if _BUSYBOX else ["busybox-static"]
    if lacks:
        return f"no {', '.join(lacks)}; `make test-container` installs them (Debian, as root)"
    return "" if os.geteuid() == 0 else "podman's service needs a mount namespace, which needs root"


class Podman:
    """The service, from `async with` on; `socket` is where it listens. Skips the test if no container can run here."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="podman-"))  # podman bears no long names
        self.socket = self.folder / "podman.sock"
        self._service: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Podman:
        (self.folder / "containers.conf").write_text(_CONFIG.format(folder=self.folder))
        self._rootfs()
        for words in (
            ("import", str(self.folder / "rootfs.tar"), IMAGE),
            ("run", "--rm", "--network=none", IMAGE, "true"),
        ):
            if why := await self._fails(*words):
                await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)
                pytest.skip(f"containers cannot be tried here: podman {words[0]}: {why}")
        self._service = await self._spawn("system", "service", "--time=0", f"unix://{self.socket}")
        async with asyncio.timeout(PATIENCE):
            while not await self._answers():
                assert self._service.returncode is None, "podman's service ended"
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._service is not None
        async with self._session() as session:
            async with session.get("http://localhost/v1.40/containers/json?all=true") as answer:
                left = [container["Id"] for container in await answer.json()]
            for name in left:
                await session.delete(f"http://localhost/v1.40/containers/{name}?force=true")
        self._service.terminate()
        await self._service.wait()
        await asyncio.to_thread(shutil.rmtree, self.folder)

    @property
    def engine(self) -> str:
        return f"unix://{self.socket}"

    async def _fails(self, *words: str) -> str:
        """Run one command of podman's; what is wrong, if anything is."""
        process = await self._spawn(*words, output=asyncio.subprocess.PIPE)
        _, err = await process.communicate()
        return err.decode() or "it failed without a word" if process.returncode else ""

    async def restart(self) -> None:
        """End the service, as an upgrade does; its containers go on."""
        assert self._service is not None
        self._service.terminate()
        await self._service.wait()
        self._service = await self._spawn("system", "service", "--time=0", self.engine)

    async def _spawn(self, *words: str, output: int | None = None) -> asyncio.subprocess.Process:
        places = [f"--root={self.folder}/root", f"--runroot={self.folder}/run", "--storage-driver=vfs"]
        inside = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
        return await asyncio.create_subprocess_exec(
            *("unshare", "--mount", "sh", "-c", inside, "sh"),
            *("podman", *places, *words),
            env={**os.environ, "CONTAINERS_CONF": str(self.folder / "containers.conf"), "TMPDIR": str(self.folder)},
            stdout=output,
            stderr=output,
            stdin=asyncio.subprocess.DEVNULL,
            cwd=self.folder,  # where conmon leaves a file when something was killed for its memory
        )

    async def _answers(self) -> bool:
        with contextlib.suppress(OSError, aiohttp.ClientError):
            async with self._session() as session, session.get("http://localhost/_ping") as answer:
                return answer.status == 200
        return False

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket)))

    def _rootfs(self) -> None:
        with tarfile.open(self.folder / "rootfs.tar", "w") as tar:
            tar.add(_BUSYBOX, "bin/busybox")
            for name in ("sh", "sleep", "awk", "dd", "echo", "printf", "seq", "cat", "true", "env", "ip", "id", "ls"):
                link = tarfile.TarInfo(f"bin/{name}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
            for name in ("tmp", "proc", "sys", "dev", "etc", "run"):
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(folder)
