"""A sandbox for programs, by bubblewrap: the system read-only, a private /tmp, no network, no sight of other processes.

Only the folders of the system are there, so neither the worker's home with its credentials nor other runs' folders are
to be seen. A worker that is root gives a sandboxed run the rights of nobody, because an owner may read his own files,
in whichever namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix/store")
_NOBODY = 65_534
HOME = "/tmp"


class Sandbox:
    """Whether this machine has one, and how a command gets into it."""

    def __init__(self) -> None:
        self.owner = _NOBODY if os.getuid() == 0 else None
        self._bwrap, self._setpriv = shutil.which("bwrap"), shutil.which("setpriv")
        self.works = self._try()

    def _try(self) -> bool:
        """That the program is there does not mean that it may make namespaces."""
        if self._bwrap is None or (self.owner is not None and self._setpriv is None):
            return False
        try:
            return subprocess.run([*self.around(), "true"], capture_output=True, timeout=10).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    def around(self, folder: str | None = None) -> list[str]:
        """What is put in front of a command, which begins in `folder` and may write there."""
        return [*self._as_nobody(), self._bwrap or "bwrap", *_arguments(folder)]

    def _as_nobody(self) -> Iterator[str]:
        if self.owner is not None:
            yield from (self._setpriv or "setpriv", f"--reuid={self.owner}", f"--regid={self.owner}")
            yield from ("--clear-groups", "--pdeathsig", "KILL", "--")


def _arguments(folder: str | None) -> Iterator[str]:
    yield from ("--unshare-all", "--die-with-parent")
    for path in _SYSTEM:
        yield from ("--ro-bind-try", path, path)
    yield from ("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/var/tmp")
    if folder is not None:
        yield from ("--bind", folder, folder, "--chdir", folder)
    yield "--"
