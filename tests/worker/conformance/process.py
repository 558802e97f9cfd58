"""Programs, plain and in a sandbox."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil

from tocsin.worker.sandbox import Sandbox

from .harness import BINARY, Deed, Harness

_UP = "import signal, time; print('up', flush=True); time.sleep(300)"
_PROGRAMS: dict[Deed, str] = {
    "nothing": "pass",
    "say": "print('héllo')",
    "fail": "raise SystemExit(3)",
    "die": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "wait": _UP,
    "refuse": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + _UP,
    "flood": "import sys\nfor _ in range(40_000): sys.stdout.write('x' * 999 + '\\n')",
    "binary": f"import os; os.write(1, {BINARY!r})",
    "hog": "keep = [bytearray(b'x') * (10 << 20) for _ in range(60)]",
}


class ProcessHarness(Harness):
    kind = "process"
    fails_as = ("exit", 3)
    dies_as = "signal"
    python = sys.executable

    def target(self, deed: Deed) -> dict[str, Any]:
        if deed == "absent":
            return {"kind": "process", "command": ["/no/such/program"]}
        program = [self.python, "-I", "-S", "-X", "utf8", "-c", _PROGRAMS[deed]]
        return {"kind": "process", "command": [*program, str(self.where)]}

    def left(self) -> list[str]:
        """They are known by their last argument."""
        found = psutil.process_iter(["cmdline"])
        return [str(process.pid) for process in found if str(self.where) in (process.info["cmdline"] or [])]


class SandboxHarness(ProcessHarness):
    python = "/usr/bin/python3"  # where a sandbox can see it

    def missing(self) -> str:
        if not Sandbox().works:
            return "bubblewrap is not here, or may not make namespaces"
        return "" if os.access(self.python, os.X_OK) else f"there is no {self.python}"

    def target(self, deed: Deed) -> dict[str, Any]:
        return super().target(deed) | {"sandbox": True}
