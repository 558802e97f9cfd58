"""quotas: what a tenant may submit. Refused is what goes beyond, with a reason and when to come back.

Costs a submission no query of its own: the quotas come with the caller's key, and the counts behind them are at most a
second old, with what this node has let through since then added. So what several nodes let through in the same second
may go beyond. The rate of submissions is kept by each node for itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from tocsin.errors import ApiProblem, Forbidden, TooManyRequests
from tocsin.flow.shared.idempotency import Wish
from tocsin.model.access import Identity
from tocsin.model.limits import parse_rate
from tocsin.model.quotas import Meter, Quotas
from tocsin.store.db import Database, Sql
from tocsin.telemetry import QUOTA_REFUSED

SQL = Sql(__file__)
_FRESH_SECONDS = 1.0
_COME_BACK_SECONDS = 5  # nobody knows when a queue is shorter


@dataclass
class _Used:
    jobs: int = 0
    queued: int = 0
    read_at: float = float("-inf")
    brings: dict[str, int] = field(default_factory=dict)  # a run of these, or the retry of one, as many runs in all


class Grant(NamedTuple):
    """How many runs a call may make, by a count that was read at that instant."""

    most: int
    read_at: float


class Allowances:
    """What this node remembers of the tenants that have quotas."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._used: dict[int, _Used] = defaultdict(_Used)
        self._meters: dict[int, Meter] = defaultdict(Meter)
        self._looks: dict[int, Meter] = defaultdict(Meter)
        self._reading: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def admit(
        self, who: Identity, wish: Wish | None, *, jobs: int = 0, runs: int = 0, of: str | None = None
    ) -> None:
        """Let a call pass that makes so many jobs and runs, or raise why not. What passed once may be repeated. `of`:
        the job that the runs are of, or the run that is run again; of a workflow, each brings those of its nodes."""
        if who.quotas is None:
            return
        problem = await self._over(who.tenant_id, who.quotas, jobs, runs, of)
        if problem is not None and not await self._is_repeat(who.quotas, wish):
            QUOTA_REFUSED.labels(problem.code).inc()
            raise problem

    async def admit_some(self, who: Identity, wish: Wish | None, most: int) -> Grant:
        """Let a call pass that makes at least one run, and answer how many it may make. All of them count until
        `made`."""
        await self.admit(who, wish, runs=1)
        if who.quotas is None or who.quotas.max_queued is None:
            return Grant(most, 0.0)
        used = self._used[who.tenant_id]
        granted = max(1, min(most, who.quotas.max_queued - used.queued + 1))
        used.queued += granted - 1
        return Grant(granted, used.read_at)

    def made(self, who: Identity, grant: Grant, runs: int) -> None:
        """So many runs came of what was granted."""
        used, quotas = self._used[who.tenant_id], who.quotas
        if used.read_at == grant.read_at:
            used.queued -= grant.most - runs
        if quotas is not None and quotas.submit_rate is not None and runs > 1:
            self._meters[who.tenant_id].count(parse_rate(quotas.submit_rate), runs - 1, self._db.clock.now())

    async def _over(
        self, tenant_id: int, quotas: Quotas, jobs: int, runs: int, of: str | None = None
    ) -> ApiProblem | None:
        used = await self._count(tenant_id, quotas)
        queued = runs if of is None or quotas.max_queued is None else runs * await self._brings(tenant_id, used, of)
        if jobs and quotas.max_jobs is not None and used.jobs + jobs > quotas.max_jobs:
            return Forbidden(
                f"the tenant may have {quotas.max_jobs} open jobs and has {used.jobs}",
                code="quota_max_jobs",
                headers={"retry-after": str(_COME_BACK_SECONDS)},
            )
        if runs and quotas.max_queued is not None and used.queued + queued > quotas.max_queued:
            return TooManyRequests(
                f"the tenant may have {quotas.max_queued} runs that wait to start and has {used.queued}; this would be "
                f"{queued} more",
                code="quota_max_queued",
                headers={"retry-after": str(_COME_BACK_SECONDS)},
            )
        if quotas.submit_rate is not None:
            rate, now, count = parse_rate(quotas.submit_rate), self._db.clock.now(), max(1, jobs, runs)
            wait = self._meters[tenant_id].wait(rate, count, now)
            if wait:
                return TooManyRequests(
                    f"the tenant may submit {quotas.submit_rate}",
                    code="quota_submit_rate",
                    headers={"retry-after": str(math.ceil(wait.total_seconds()))},
                )
            self._meters[tenant_id].count(rate, count, now)
        used.jobs += jobs
        used.queued += queued
        return None

    async def _brings(self, tenant_id: int, used: _Used, of: str) -> int:
        """Read once for as long as the counts are."""
        found = used.brings.get(of)
        if found is None:
            found = used.brings[of] = 1 + int(await self._db.fetchval("engine", SQL["nodes"], tenant_id, of))
        return found

    async def _count(self, tenant_id: int, quotas: Quotas) -> _Used:
        used = self._used[tenant_id]
        if quotas.max_jobs is None and quotas.max_queued is None:
            return used
        if time.monotonic() - used.read_at > _FRESH_SECONDS:
            async with self._reading[tenant_id]:
                if time.monotonic() - used.read_at > _FRESH_SECONDS:
                    began = time.monotonic()
                    most = [0 if limit is None else limit + 1 for limit in (quotas.max_jobs, quotas.max_queued)]
                    row = await self._db.fetchrow("engine", SQL["used"], tenant_id, *most)
                    used.jobs, used.queued, used.read_at = row["jobs"], row["queued"], began
                    used.brings.clear()
        return used

    async def _is_repeat(self, quotas: Quotas, wish: Wish | None) -> bool:
        """Whether this very call passed before. Looked up only as often as the tenant may submit: a flood of new calls
        is not to cost a query each, and a repeat that is refused now may come again."""
        if wish is None:
            return False
        if quotas.submit_rate is not None:
            rate, now, looks = parse_rate(quotas.submit_rate), self._db.clock.now(), self._looks[wish.tenant_id]
            if looks.wait(rate, 1, now):
                return False
            looks.count(rate, 1, now)
        return bool(await self._db.fetchval("engine", SQL["known"], wish.tenant_id, wish.key))
