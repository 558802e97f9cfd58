"""Working folders: one for each run, made when it starts and removed when it has ended, whatever it left there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tocsin.telemetry import get_logger

log = get_logger("worker")

_OURS = re.compile(r"tocsin-runs-(\d+)-(\d+)-.+")  # whose: a process, within a namespace of process ids


class Folders:
    """All of one worker. Disks may let one wait, so folders are made ahead, and removed, by a thread."""

    def __init__(self) -> None:
        self._base = _base()
        self._spare: list[str] = []  # made and not yet used; never more than there were runs at once
        self._thread = ThreadPoolExecutor(2, thread_name_prefix="folders")

    def make(self, owner: int | None = None) -> str:
        """A new folder for a run's eyes only."""
        path = self._spare.pop() if self._spare else self._new()
        try:
            os.stat(path)
        except FileNotFoundError:  # some machines remove what lies in /tmp for long
            path = self._new()
        if owner is not None:
            os.chown(path, owner, owner)
        return path

    def drop(self, path: str) -> None:
        """Remove one that nobody has used."""
        _remove(path)

    async def remove(self, path: str) -> None:
        """Returns when it is gone, and a new one is there for the next run; what cannot be removed is told."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._replace, path)

    def close(self) -> None:
        """Remove the folder of folders."""
        self._thread.shutdown()
        _remove(self._base)

    def _new(self) -> str:
        try:
            return tempfile.mkdtemp(dir=self._base)
        except FileNotFoundError:
            self._base = _base()
            return tempfile.mkdtemp(dir=self._base)

    def _replace(self, path: str) -> None:
        _remove(path)
        with contextlib.suppress(OSError):  # whoever needs one will see
            self._spare.append(self._new())

    async def sweep(self) -> None:
        """Remove what workers that are gone have left behind."""
        await asyncio.get_running_loop().run_in_executor(self._thread, _sweep)


def _sweep() -> None:
    for path in Path(tempfile.gettempdir()).glob("tocsin-runs-*"):
        found = _OURS.fullmatch(path.name)
        if found is None or int(found[1]) != _namespace():  # a worker in another container may share the folder with us
            continue
        with contextlib.suppress(FileNotFoundError):  # another worker that begins now sweeps, too
            if not os.path.exists(f"/proc/{found[2]}") and path.lstat().st_uid == os.getuid():
                _remove(str(path))


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _base() -> str:
    path = tempfile.mkdtemp(prefix=f"tocsin-runs-{_namespace()}-{os.getpid()}-")
    os.chmod(path, 0o711)  # a run that has another user must get through
    return path


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(path)  # nearly always
        return
    failed: list[str] = []

    def again(function: Callable[..., Any], name: str, _: Any) -> None:
        """A folder that its owner made unreadable for himself."""
        try:
            for each in (os.path.dirname(name), name):
                # The folder itself stands among those of others, whose mode is not ours to change.
                if os.path.commonpath([path, each]) == path and stat.S_ISDIR(os.lstat(each).st_mode):
                    os.chmod(each, 0o700)
            shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
        except FileNotFoundError:
            pass  # another sweeps the same
        except OSError as exc:
            failed.append(f"{name}: {exc}")

    shutil.rmtree(path, onerror=again)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    if failed:
        log.warning("a run's folder could not be removed", why=failed[0], count=len(failed))
