"""Containers, by a real engine: podman's."""

from __future__ import annotations

from typing import Any

import psutil

from ..podman import IMAGE, Podman, missing
from .harness import Deed, Harness

_BINARY = r"printf '\377\000\033[31m ok \303\251\r\nlong '; printf '\303\251%.0s' $(seq 10000); printf '\nno end'"
_SCRIPTS: dict[Deed, str] = {
    "nothing": "true",
    "say": "echo héllo",
    "fail": "exit 3",
    "die": "sh -c 'kill -SEGV $$'; exit $?",
    "wait": "trap 'exit 0' TERM; echo up; sleep 300 & wait",
    "refuse": "trap '' TERM; echo up; while :; do sleep 0.1; done",
    "flood": """awk 'BEGIN { s = sprintf("%999s", ""); gsub(/ /, "x", s); for (i = 0; i < 40000; i++) print s }'""",
    "binary": _BINARY,
    "hog": "dd if=/dev/zero of=/dev/null bs=600M count=1 2>/dev/null",
}


class ContainerHarness(Harness):
    kind = "container"
    fails_as = ("exit", 3)
    dies_as = "signal"

    def missing(self) -> str:
        return missing()

    async def __aenter__(self) -> ContainerHarness:
        self._podman = await Podman().__aenter__()
        self.worker = {"settings": {"container_engine": self._podman.engine}}  # type: ignore[misc]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._podman.__aexit__(*exc)

    def target(self, deed: Deed) -> dict[str, Any]:
        command = ["/no/such/program"] if deed == "absent" else ["sh", "-c", _SCRIPTS[deed]]
        env = {"CONFORMANCE": str(self.where)} if deed in ("wait", "refuse") else {}
        return {"kind": "container", "image": IMAGE, "command": command, "env": env, "pull": "never"}

    def left(self) -> list[str]:
        """Processes that have in their environment what only these deeds have."""
        return [str(process.pid) for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            ours = process.environ().get("CONFORMANCE") == str(self.where)
            return ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
