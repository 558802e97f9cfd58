"""Starts a real worker: `launch.py '{"url": …, "module": …, "slots": …, "grace": …, "settings": {…}}'`."""

from __future__ import annotations

import json
import os
import sys

from tocsin.client.credentials import Credentials
from tocsin.settings import Settings
from tocsin.worker import executors

given = json.loads(sys.argv[1])
executors.STOP_GRACE = given.get("grace", 5.0)  # before any executor takes it from there

from tocsin.worker import limits, logs, main  # noqa: E402
from tocsin.worker.executors import process, python  # noqa: E402

logs.RESULT_WAITS = given.get("result_waits", logs.RESULT_WAITS)
limits.PROCESSES = given.get("processes", limits.PROCESSES)
python._BACK_OFF = (0.0,) * 5
python.PythonExecutor.head_start = given.get("head_start", python.PythonExecutor.head_start)


class BrokenProcessExecutor(process.ProcessExecutor):
    """An executor with a bug that a run can trigger."""

    def start(self, attempts: list[executors.Attempt]) -> None:
        if any(attempt.target.command == ["meet-the-bug"] for attempt in attempts):
            raise RuntimeError("a bug of the worker's own")
        super().start(attempts)


if given.get("broken"):
    process.ProcessExecutor = BrokenProcessExecutor  # type: ignore[misc]
sys.exit(
    main.run(
        url=given["url"],
        key="the-key",
        module=given.get("module"),
        pool="default",
        slots=given.get("slots", 8),
        name=f"test-{os.getpid()}",
        labels={"region": "here"},
        editor=Credentials(given["url"], given["editor"]) if "editor" in given else None,
        settings=Settings(drain_seconds=given.get("drain_grace", 10.0), **given.get("settings", {})),
    )
)
