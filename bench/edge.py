"""edge: what a key that asks ten times as often as it may does to another tenant's submissions, and what it costs the
server to refuse it. Measured on a server of its own, whose rate per key is low enough to be passed on any machine."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from bench import submit
from bench.stand import Stand

_RATE = 200  # requests a second that a key may make
_FLOOD = 10 * _RATE
_FLOOD_CONNECTIONS = 600  # so many that it gets at its rate, although refusals are held back
_PACE = 100  # requests a second of the neighbour
_SECONDS = 5.0


@dataclass(frozen=True)
class Edge:
    """The neighbour's submissions in milliseconds, without the flood and with it; how much of the flood was refused;
    the server's CPU for each of its requests; and how much was refused of one where workers call."""

    alone_p50: float
    alone_p99: float
    flooded_p50: float
    flooded_p99: float
    asked: int
    refused: int
    flood_us: float
    worker_asked: int
    worker_refused: int

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self)


def measure(stand: Stand) -> Edge:
    """The neighbour alone, both together, and the flood alone."""
    server = stand.add_server(rate_per_key=_RATE)
    keys = [_key(stand, f"edge-{number}") for number in range(2)]
    submitting, flood = (submit.request("POST", "/v1/jobs", key, submit.JOB) for key in keys)
    alone = neighbour(server.port, submitting)
    answers = flooded(server.port, flood, _FLOOD, _FLOOD_CONNECTIONS)
    together = neighbour(server.port, submitting)
    asked, refused = answers.get(timeout=60)
    stand.await_quiet()
    before = stand.cpu()
    cost = flooded(server.port, flood, _FLOOD, _FLOOD_CONNECTIONS).get(timeout=60)[0]
    used = stand.cpu().since(before).trees["server"]
    as_worker = submit.request("POST", "/v1/worker/register", keys[1], {})
    where_workers_call = flooded(server.port, as_worker, _FLOOD, _FLOOD_CONNECTIONS).get(timeout=60)
    return Edge(*alone, *together, asked, refused, used / cost * 1e6, *where_workers_call)


def _key(stand: Stand, slug: str) -> str:
    stand.api.post("/v1/tenants", {"slug": slug})
    made: str = stand.api.post("/v1/keys", {"role": "editor"}, tenant=slug)["key"]
    return made


def neighbour(port: int, request: bytes) -> tuple[float, float]:
    """The p50 and p99 of somebody who keeps within his rate, in milliseconds."""
    took, _ = submit.in_a_process(port, request, _SECONDS, _PACE, 4)
    took.sort()
    return took[len(took) // 2] * 1e3, took[len(took) * 99 // 100] * 1e3


def flooded(port: int, request: bytes, rate: int, connections: int) -> multiprocessing.Queue[tuple[int, int]]:
    """Begin to ask so often, heeding no answer, for some seconds: how many requests there were, and how many were
    refused, when they are over. It has begun: it is connected, has had what it may have at once, and is refused."""
    answers: multiprocessing.Queue[tuple[int, int]] = multiprocessing.Queue()
    begun = multiprocessing.Event()
    given = port, request, rate, connections, answers, begun
    multiprocessing.Process(target=_flooding, args=given, daemon=True).start()
    begun.wait(60)
    return answers


def _flooding(port: int, request: bytes, rate: int, connections: int, answers: Any, begun: Any) -> None:
    answers.put(uvloop.run(_ask_on(port, request, rate, connections, begun)))


async def _ask_on(port: int, request: bytes, rate: int, connections: int, begun: Any) -> tuple[int, int]:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections)]
    start = time.perf_counter()
    asked = refused = 0

    async def connection(number: int) -> None:
        nonlocal asked, refused
        reader, writer = opened[number]
        turn = 0
        while (due := start + (turn * connections + number) / rate) < start + _SECONDS + 3:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            writer.write(request)
            status = await submit.answer(reader)
            asked, refused, turn = asked + 1, refused + (status == 429), turn + 1
            if refused > connections:
                begun.set()
        writer.close()

    await asyncio.gather(*(connection(n) for n in range(connections)))
    return asked, refused
