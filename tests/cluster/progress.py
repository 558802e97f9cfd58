"""What a long round is doing: a line that stands still on a terminal, a line every half minute elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from .nemesis import Fault

_START = b'"phase":"start"'


class Progress:
    """Reads the job ledger as it grows."""

    def __init__(self, job_ledger: Path, seconds: float) -> None:
        self._ledger, self._seconds = job_ledger, seconds
        self._began = time.monotonic()
        self._read = self._starts = 0
        self.phase = "start"
        self.faults: list[Fault] = []

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[None]:
        """Show it while the block lasts."""
        showing = asyncio.create_task(self._show())
        try:
            yield
        finally:
            showing.cancel()
            if sys.stdout.isatty():
                print("\r\033[K", end="", flush=True)

    async def _show(self) -> None:
        every, live = (1.0, True) if sys.stdout.isatty() else (30.0, False)
        while True:
            await asyncio.sleep(every)
            before = self._starts
            await asyncio.to_thread(self._count)
            line = self._line((self._starts - before) / every)
            print(f"\r\033[K{line}" if live else line, end="" if live else "\n", flush=True)

    def _count(self) -> None:
        """Starts noted since the last time. One that is torn between two looks is missed, which does no harm here."""
        with contextlib.suppress(FileNotFoundError), self._ledger.open("rb") as ledger:
            ledger.seek(self._read)
            data = ledger.read()
            self._read += len(data)
            self._starts += data.count(_START)

    def _line(self, per_second: float) -> str:
        took = int(time.monotonic() - self._began)
        open_ = [f.kind for f in self.faults if not f.ended]
        return (
            f"{took // 60}:{took % 60:02} of {self._seconds / 60:g} min, {self.phase} done · {self._starts} starts, "
            f"{per_second:.0f}/s · {len(self.faults)} faults" + (f" · now: {', '.join(open_)}" if open_ else "")
        )
