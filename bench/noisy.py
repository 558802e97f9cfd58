"""noisy: one tenant submits at ten times its rate, and does not listen when it is refused; another submits as ever.
What the other notices: its p99 beside the first one, as a ratio to its p99 alone, by turns."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from bench.edge import flooded, neighbour
from bench.stand import Stand
from bench.submit import JOB, request

BAR = 2.0
TIMES = 10
_ALLOWED = 100  # submissions a second that the loud one may have
_CONNECTIONS = 400  # of the loud one: so many that it gets at its rate, although refusals are held back


@dataclass(frozen=True)
class Noisy:
    """The p50 and p99 of the quiet one's submissions in milliseconds, each turn."""

    alone: list[tuple[float, float]]
    beside: list[tuple[float, float]]

    @property
    def ratio(self) -> float:
        """Of the p99s, in the middle of all turns."""
        return statistics.median(b[1] / a[1] for a, b in zip(self.alone, self.beside, strict=True))

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self) | {"ratio": self.ratio, "bar": BAR}


def measure(stand: Stand, repeat: int) -> Noisy:
    """Alone and beside, each first every other time."""
    api, port = stand.api, stand.settings.port
    asking = {}
    for slug in ("loud", "quiet"):
        api.post("/v1/tenants", {"slug": slug})
        asking[slug] = request("POST", "/v1/jobs", api.post("/v1/keys", {"role": "editor"}, slug)["key"], JOB)
    api.call("PATCH", "/v1/tenants/loud", {"quotas": {"submit_rate": f"{_ALLOWED}/s"}})
    found = Noisy([], [])
    for turn in range(repeat):
        for beside in (False, True) if turn % 2 == 0 else (True, False):
            stand.await_quiet()
            if not beside:
                found.alone.append(neighbour(port, asking["quiet"]))
                continue
            noise = flooded(port, asking["loud"], TIMES * _ALLOWED, _CONNECTIONS)
            found.beside.append(neighbour(port, asking["quiet"]))
            noise.get(timeout=60)
    return found
