"""submit: one job a request over kept connections, in batches, and the status of a run by id."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import uvloop

from bench.stand import Stand

_CONNECTIONS = 32
_SECONDS = 5.0
_WARM_UP = 0.5  # seconds before each round that do not count
_PACED = 1000  # requests a second of the paced rounds
_BATCH = 1000  # jobs to a request
_BATCH_CONNECTIONS = 8
JOB = {"schedule": {"manual": True}, "target": {"kind": "process", "command": ["true"]}, "tags": {"team": "bench"}}


@dataclass(frozen=True)
class Rate:
    """Answers a second, and how long they took in milliseconds."""

    what: str
    per_second: float
    p50: float
    p99: float
    server_us: float
    postgres_us: float

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)


def usual_rate(rates: Sequence[Rate]) -> float:
    """Answers a second, in the middle of several rounds."""
    return statistics.median(rate.per_second for rate in rates)


def usual_cpu(rates: Sequence[Rate]) -> float:
    """CPU µs of an answer, the same way."""
    return statistics.median(rate.server_us + rate.postgres_us for rate in rates)


def measure(stand: Stand) -> list[Rate]:
    """Flat out, paced, in batches, and reading by id."""
    api = stand.api
    job = api.post("/v1/jobs", JOB)["id"]
    run = api.post(f"/v1/jobs/{job}/runs", {})["id"]
    create = request("POST", "/v1/jobs", stand.keys["key"], JOB)
    read = request("GET", f"/v1/runs/{run}", stand.keys["key"])
    return [
        # First: what the others wrote is still being tidied up for a while after them.
        round_of(stand, f"status by id at {_PACED:,}/s", read, rate=_PACED),
        round_of(stand, f"submit at {_PACED:,}/s", create, rate=_PACED),
        submit_flat_out(stand, "submit, one job a request"),
        _batches(stand),
    ]


def submit_flat_out(stand: Stand, what: str) -> Rate:
    """One job a request, as fast as they are taken."""
    return round_of(stand, what, request("POST", "/v1/jobs", stand.keys["key"], JOB))


def _batches(stand: Stand) -> Rate:
    """Jobs a second, not requests; the latencies are of whole batches."""
    batch = request("POST", "/v1/jobs/batch", stand.keys["key"], {"jobs": [JOB] * _BATCH})
    found = round_of(stand, f"submit in batches of {_BATCH:,}, jobs", batch, connections=_BATCH_CONNECTIONS)
    return replace(
        found,
        per_second=found.per_second * _BATCH,
        server_us=found.server_us / _BATCH,
        postgres_us=found.postgres_us / _BATCH,
    )


def request(method: str, path: str, key: str, body: object = None) -> bytes:
    """A whole request with a key, as it goes over the wire."""
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def round_of(
    stand: Stand,
    what: str,
    asking: bytes,
    *,
    rate: int | None = None,
    connections: int = _CONNECTIONS,
    port: int | None = None,
) -> Rate:
    """One request again and again for some seconds, flat out or at a rate, to the first server or another."""
    stand.await_quiet()
    before = stand.cpu()
    took, asked = in_a_process(port or stand.settings.port, asking, _SECONDS, rate, connections)
    took.sort()
    used = stand.cpu().since(before)
    count = len(took)
    return Rate(
        what,
        count / _SECONDS,
        took[count // 2] * 1e3,
        took[count * 99 // 100] * 1e3,
        used.trees["server"] / asked * 1e6,
        used.trees["postgres"] / asked * 1e6,
    )


def in_a_process(
    port: int, asking: bytes, seconds: float, rate: int | None, connections: int
) -> tuple[list[float], int]:
    """How long each answer took, and how many there were with those of the warm-up, to a client of its own."""
    answers: multiprocessing.Queue[tuple[list[float], int]] = multiprocessing.Queue()
    client = multiprocessing.Process(
        target=_client, args=(port, asking, seconds, rate, connections, answers), daemon=True
    )
    client.start()
    found = answers.get(timeout=seconds + 60)
    client.join()
    return found


def _client(port: int, asking: bytes, seconds: float, rate: int | None, connections: int, answers: Any) -> None:
    answers.put(uvloop.run(_load(port, asking, seconds, rate, connections)))


async def _load(
    port: int, asking: bytes, seconds: float, rate: int | None, connections: int
) -> tuple[list[float], int]:
    start = time.perf_counter()
    begin = start + _WARM_UP
    end = begin + seconds
    took: list[float] = []
    asked = 0

    async def connection(number: int) -> None:
        nonlocal asked
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        turn = 0
        while time.perf_counter() < end:
            # Paced: each has its own instants, and lateness counts from the instant, not from the sending.
            due = start + (turn * connections + number) / rate if rate else time.perf_counter()
            if due >= end:
                break
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(asking)
            if (status := await answer(reader)) >= 300:
                raise RuntimeError(f"the server answers {status}")
            asked += 1
            if due >= begin:
                took.append(time.perf_counter() - due)
            turn += 1
        writer.close()

    await asyncio.gather(*(connection(n) for n in range(connections)))
    return took, asked


async def answer(reader: asyncio.StreamReader) -> int:
    """Read one answer; its status."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, _, headers = head.partition(b"\r\n")
    length = int(headers.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return int(status.split(b" ", 2)[1])
