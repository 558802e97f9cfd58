"""Programs."""

from __future__ import annotations

import sys
from typing import Any

from ..conftest import alive
from .harness import BINARY, Deed, Harness

_NOTE = "import os, signal, sys, time; open(sys.argv[1] + f'/{os.getpid()}', 'w').close();"
_UP = "print('up', flush=True); time.sleep(300)"
_PROGRAMS: dict[Deed, str] = {
    "nothing": "pass",
    "say": "print('héllo')",
    "fail": "raise SystemExit(3)",
    "die": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "wait": _NOTE + _UP,
    "refuse": _NOTE + "signal.signal(signal.SIGTERM, signal.SIG_IGN);" + _UP,
    "flood": "import sys\nfor _ in range(40_000): sys.stdout.write('x' * 999 + '\\n')",
    "binary": f"import os; os.write(1, {BINARY!r})",
    "hog": "keep = [bytearray(b'x') * (10 << 20) for _ in range(60)]",
}


class ProcessHarness(Harness):
    kind = "process"
    fails_as = ("exit", 3)
    dies_as = "signal"

    def target(self, deed: Deed) -> dict[str, Any]:
        if deed == "absent":
            return {"kind": "process", "command": ["/no/such/program"]}
        program = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAMS[deed]]
        return {"kind": "process", "command": [*program, str(self.where)]}

    def left(self) -> list[str]:
        return [path.name for path in self.where.iterdir() if alive(int(path.name))]
