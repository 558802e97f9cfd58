"""Functions, of both colours: those that are async, and those that run in a thread."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from ..conftest import alive
from .harness import Deed, Harness

_FUNCTIONS: dict[Deed, tuple[str, ...]] = {
    "nothing": ("math.add", "1"),
    "say": ("conformance.say",),
    "fail": ("fail",),
    "die": ("crash", '"signal"'),
    "absent": ("no.such.function",),
    "wait": ("conformance.wait", "false"),
    "refuse": ("conformance.wait", "true"),
    "flood": ("conformance.flood",),
    "hog": ("conformance.hog",),
}


class PythonHarness(Harness):
    kind = "python"
    fails_as = ("ValueError", None)
    dies_as = "crashed"
    lacks: ClassVar[dict[Deed, str]] = {"binary": "a function prints text, not bytes"}
    worker: ClassVar[dict[str, Any]] = {"module": "sample:app"}
    suffix = ""

    def target(self, deed: Deed) -> dict[str, Any]:
        name, *words = _FUNCTIONS[deed]
        if name.startswith("conformance."):
            name += self.suffix
        args = [json.loads(word) for word in words]
        if deed in ("wait", "refuse"):
            args.append(str(self.where))
        return {"kind": "python", "function": name, "args": args}

    def left(self) -> list[str]:
        """Those that neither said that they are gone nor went with their process."""
        begun = [path for path in self.where.iterdir() if path.suffix != ".gone"]
        lives = [path for path in begun if not path.with_suffix(".gone").exists()]
        return [path.name for path in lives if alive(int(path.name.partition("-")[0]))]


class PythonThreadHarness(PythonHarness):
    suffix = ".sync"
