"""The job that keeps a ledger: notes its start and its end, outside the product, and sleeps or fails between.

As a program (target `process`; needs no installation):
    python tests/cluster/jobs.py [--ledger FILE] [--seconds S] [--first-seconds S] [--fail-attempts N] [--key K]
                                 [--lines N]
As functions (target `python`; `tocsin worker tests.cluster.jobs:app`): `trust.work`, `trust.work_async`, `trust.note`.

The ledger is named by the run's args, the option, or TRUST_LEDGER in the environment. A run's args win over options:
{"ledger", "seconds", "first_seconds", "fail_attempts", "key", "lines"}. The first attempt takes `first_seconds` where
they are given; the first `fail_attempts` attempts fail after their end is noted. `lines` are written to the log, half
before and half after the wait, and the end notes what they were.

A function's notes are not flushed to the disk (`flush: true` would): they outlive every kill of a process, and no fault
of the suite takes the machine down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

if __name__ == "__main__":
    from ledger import Appender, digest, wall_us  # type: ignore[import-not-found]  # a script's own folder is on its path
else:
    from .ledger import Appender, digest, wall_us


class Attempt:
    """One attempt as the job itself sees it."""

    def __init__(
        self,
        ledger: str | None,
        run_id: str,
        job_id: str,
        attempt: int,
        fence: int,
        key: str | None,
        *,
        flush: bool = True,
    ) -> None:
        path = ledger or os.environ.get("TRUST_LEDGER")
        if not path:
            raise SystemExit("no ledger: give it as an argument or as TRUST_LEDGER")
        self._file = Appender(path, flush=flush)
        self._who = {"run_id": run_id, "job_id": job_id, "attempt": attempt, "fence": fence, "key": key}
        self.attempt = attempt
        self._said: list[str] = []

    def note(self, phase: str, ok: bool = True, **more: Any) -> None:
        boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        line = self._who | {"phase": phase, "ok": ok, "boottime_ns": boottime, "wall_us": wall_us()}
        wrote = {"wrote": digest(self._said)} if self._said and phase == "end" else {}
        self._file.write(line | {"pid": os.getpid()} | wrote | more)

    def say(self, count: int) -> None:
        """Write so many lines that no other attempt writes."""
        for _ in range(count):
            text = f"line {len(self._said)} of attempt {self.attempt} of {self._who['run_id']}: ünïcödé and  spaces"
            print(text, flush=True)
            self._said.append(text)

    def length(self, seconds: float, first_seconds: float | None) -> float:
        """How long this attempt is to take."""
        return seconds if first_seconds is None or self.attempt > 1 else first_seconds

    def finish(self, fail_attempts: int) -> dict[str, Any]:
        """Note the end; then fail if this attempt is one that must."""
        ok = self.attempt > fail_attempts
        self.note("end", ok)
        self._file.close()
        if not ok:
            raise RuntimeError(f"attempt {self.attempt} fails as asked")
        return {"attempt": self.attempt, "pid": os.getpid()}


def main() -> int:
    parser = argparse.ArgumentParser(description="a job that keeps a ledger")
    parser.add_argument("--ledger")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--first-seconds", type=float)
    parser.add_argument("--fail-attempts", type=int, default=0)
    parser.add_argument("--key")
    parser.add_argument("--lines", type=int, default=0)
    options = vars(parser.parse_args()) | (json.loads(os.environ.get("TOCSIN_ARGS") or "null") or {})
    env = os.environ
    attempt = Attempt(
        options["ledger"],
        env["TOCSIN_RUN_ID"],
        env["TOCSIN_JOB_ID"],
        int(env["TOCSIN_ATTEMPT"]),
        int(env["TOCSIN_FENCE"]),
        options["key"],
    )
    attempt.note("start", born_ns=_born_ns())
    attempt.say(options["lines"] // 2)
    time.sleep(attempt.length(options["seconds"], options["first_seconds"]))
    attempt.say(options["lines"] - options["lines"] // 2)
    try:
        attempt.finish(options["fail_attempts"])
    except RuntimeError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


def _born_ns() -> int:
    """When this process came into being, on the clock of the notes; it may have been frozen since."""
    with open("/proc/self/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _make_app() -> Any:
    import asyncio

    from tocsin import App

    app = App()

    def begin(ctx: Any, ledger: str | None, key: str | None, flush: bool) -> Attempt:
        attempt = Attempt(ledger, ctx.run_id, ctx.job_id, ctx.attempt, ctx.fence, key, flush=flush)
        attempt.note("start")
        return attempt

    @app.function("trust.work")
    def work(
        ctx: Any,
        ledger: str | None = None,
        seconds: float = 0,
        first_seconds: float | None = None,
        fail_attempts: int = 0,
        key: str | None = None,
        lines: int = 0,
        flush: bool = False,
    ) -> dict[str, Any]:
        attempt = begin(ctx, ledger, key, flush)
        attempt.say(lines // 2)
        time.sleep(attempt.length(seconds, first_seconds))
        attempt.say(lines - lines // 2)
        return attempt.finish(fail_attempts)

    @app.function("trust.note")
    async def note(ctx: Any, ledger: str) -> None:
        """Nothing but its notes: for thousands of runs."""
        begin(ctx, ledger, None, flush=False).finish(0)

    @app.function("trust.work_async")
    async def work_async(
        ctx: Any,
        ledger: str | None = None,
        seconds: float = 0,
        first_seconds: float | None = None,
        fail_attempts: int = 0,
        key: str | None = None,
        lines: int = 0,
        flush: bool = False,
    ) -> dict[str, Any]:
        attempt = begin(ctx, ledger, key, flush)
        attempt.say(lines // 2)
        await asyncio.sleep(attempt.length(seconds, first_seconds))
        attempt.say(lines - lines // 2)
        return attempt.finish(fail_attempts)

    return app


if __name__ == "__main__":
    sys.exit(main())
app = _make_app()
