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
from pathlib import Path
from typing import Any

from tocsin.telemetry import get_logger

log = get_logger("worker")

_OURS = re.compile(r"tocsin-runs-(\d+)-.+")


class Folders:
    """All of one worker."""

    def __init__(self) -> None:
        self._base = _base()

    def make(self, owner: int | None = None) -> str:
        """A new folder for a run's eyes only."""
        try:
            path = tempfile.mkdtemp(dir=self._base)
        except FileNotFoundError:  # some machines remove what lies in /tmp for long
            self._base = _base()
            path = tempfile.mkdtemp(dir=self._base)
        if owner is not None:
            os.chown(path, owner, owner)
        return path

    async def remove(self, path: str) -> None:
        """Returns when it is gone; what cannot be removed is told."""
        try:
            os.rmdir(path)  # nearly always
        except OSError:
            await asyncio.to_thread(_remove, path)

    def close(self) -> None:
        """Remove the folder of folders."""
        _remove(self._base)

    @staticmethod
    def sweep() -> None:
        """Remove what workers that are gone have left behind."""
        for path in Path(tempfile.gettempdir()).glob("tocsin-runs-*"):
            found = _OURS.fullmatch(path.name)
            if found is not None and not os.path.exists(f"/proc/{found[1]}") and path.lstat().st_uid == os.getuid():
                _remove(str(path))


def _base() -> str:
    path = tempfile.mkdtemp(prefix=f"tocsin-runs-{os.getpid()}-")
    os.chmod(path, 0o711)  # a run that has another user must get through
    return path


def _remove(path: str) -> None:
    failed: list[str] = []

    def again(function: Callable[..., Any], name: str, _: Any) -> None:
        """A folder that its owner made unreadable for himself."""
        try:
            for each in (os.path.dirname(name), name):
                if stat.S_ISDIR(os.lstat(each).st_mode):
                    os.chmod(each, 0o700)
            shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.unlink(name)
        except OSError as exc:
            failed.append(f"{name}: {exc}")

    shutil.rmtree(path, onerror=again)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    if failed:
        log.warning("a run's folder could not be removed", why=failed[0], count=len(failed))
