"""Two ledgers written outside the product: what the client asked and was answered, and what really ran.

Both are JSON lines, flushed to the disk before anything follows from them. A record begins with a line feed too, so
that a line torn by kill -9 never swallows the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class Appender:
    """Appends whole records to a file shared by any number of processes."""

    def __init__(self, path: str | Path, *, flush: bool = True) -> None:
        self._flush = flush
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, record: dict[str, Any]) -> None:
        """Returns once the record is on the disk (without `flush`: once it would survive the process)."""
        line = f"\n{json.dumps(record, separators=(',', ':'))}\n".encode()
        if os.write(self._fd, line) != len(line):
            raise OSError("the ledger was written in part")
        if self._flush:
            os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class ClientLedger:
    """What the driver asked (before it asks) and what it was answered (before it believes it)."""

    def __init__(self, path: str | Path) -> None:
        self._file = Appender(path)
        self._lock = threading.Lock()
        # Numbers go on where an earlier driver on the same file left off.
        self._last = max((r["n"] for r in read(path)), default=0)

    def intent(self, op: str, path: str, key: str, **more: Any) -> int:
        """Note a request before it is sent; answers the number that its reply must carry."""
        with self._lock:
            self._last += 1
            n = self._last
        self._file.write({"n": n, "phase": "intent", "op": op, "path": path, "key": key, "wall_us": wall_us()} | more)
        return n

    def reply(self, n: int, status: int, ids: Iterable[str] = (), **more: Any) -> None:
        """Note the final answer to request `n`."""
        self._file.write({"n": n, "phase": "reply", "status": status, "ids": list(ids), "wall_us": wall_us()} | more)

    def close(self) -> None:
        self._file.close()


def read(*paths: str | Path) -> list[dict[str, Any]]:
    """Every whole record of the files, in order; what a kill has torn is left out."""
    return [record for path in paths if Path(path).exists() for record in _records(Path(path).read_bytes())]


def _records(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            record = json.loads(line) if line.strip() else None
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def made_at(run_id: str) -> float:
    """When (Unix time) a run was made: its id begins with the millisecond."""
    return int(run_id.replace("-", "")[:12], 16) / 1000


def recent_lags(path: str | Path, size: int = 50_000) -> list[float]:
    """How long the runs that started last had waited since they were made, in seconds; first attempts only."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - size, 0))
        lines = _records(file.read())
    return [
        line["wall_us"] / 1e6 - made_at(line["run_id"])
        for line in lines
        if line.get("phase") == "start" and line["attempt"] == 1
    ]


def wall_us() -> int:
    """Microseconds since 1970 on this host's wall clock, rounded down."""
    return time.time_ns() // 1000


def digest(lines: list[str]) -> str:
    """What was written to a log: how many lines, and what they say."""
    text = "\n".join(lines)
    return f"{len(lines)}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"
