"""audit: what it takes of the submit rate that every call leaves a record, and that the records are chained.

Both in one run and by turns, on one server: in every other round a trigger swallows the records before they are
stored, so that there is nothing to seal either.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from bench.stand import Stand
from bench.submit import Rate, submit_flat_out, usual_cpu, usual_rate

BAR = 0.15
_SWALLOW = """
create function tocsin.bench_swallow() returns trigger language plpgsql as 'begin return null; end';
create trigger bench_swallow before insert on tocsin.audit for each row execute function tocsin.bench_swallow();
"""
_KEEP = "drop trigger bench_swallow on tocsin.audit; drop function tocsin.bench_swallow();"
_BEHIND = "select coalesce((select max(id) from tocsin.audit), 0) - (select high from tocsin.audit_sealer)"


@dataclass(frozen=True)
class Cost:
    """Jobs stored a second with and without the audit, and how many records the sealer was behind after each round
    with it."""

    audited: list[Rate]
    silent: list[Rate]
    behind: list[int]

    @property
    def share(self) -> float:
        """Of the rate that auditing takes."""
        return 1 - usual_rate(self.audited) / usual_rate(self.silent)

    @property
    def cpu_share(self) -> float:
        """Of the processors' time that auditing takes: it shows on a machine that others use meanwhile, too."""
        return 1 - usual_cpu(self.silent) / usual_cpu(self.audited)

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        return asdict(self) | {"share": self.share, "cpu_share": self.cpu_share, "bar": BAR}


def measure(stand: Stand, repeat: int) -> Cost:
    """By turns, so that what slows the machine down slows down both."""
    stand.api.create_job({"kind": "process", "command": ["true"]})
    audited, silent, behind = [], [], []
    for _ in range(repeat):
        audited.append(submit_flat_out(stand, "submit, audited and sealed"))
        behind.append(asyncio.run(stand.query(_BEHIND))[0][0])
        asyncio.run(stand.execute(_SWALLOW))
        silent.append(submit_flat_out(stand, "submit without the audit"))
        asyncio.run(stand.execute(_KEEP))
    return Cost(audited, silent, behind)
