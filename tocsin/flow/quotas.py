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
from dataclasses import dataclass

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


class Allowances:
    """What this node remembers of the tenants that have quotas."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._used: dict[int, _Used] = defaultdict(_Used)
        self._meters: dict[int, Meter] = defaultdict(Meter)
        self._looks: dict[int, Meter] = defaultdict(Meter)
        self._reading: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def admit(self, who: Identity, wish: Wish | None, *, jobs: int = 0, runs: int = 0) -> None:
        """Let a call pass that makes so many jobs and runs, or raise why not. What passed once may be repeated."""
        if who.quotas is None:
            return
        problem = await self._over(who.tenant_id, who.quotas, jobs, runs)
        if problem is not None and not await self._is_repeat(who.quotas, wish):
            QUOTA_REFUSED.labels(problem.code).inc()
            raise problem

    async def _over(self, tenant_id: int, quotas: Quotas, jobs: int, runs: int) -> ApiProblem | None:
        used = await self._count(tenant_id, quotas)
        if jobs and quotas.max_jobs is not None and used.jobs + jobs > quotas.max_jobs:
            return Forbidden(
                f"the tenant may have {quotas.max_jobs} open jobs and has {used.jobs}",
                code="quota_max_jobs",
                headers={"retry-after": str(_COME_BACK_SECONDS)},
            )
        if runs and quotas.max_queued is not None and used.queued + runs > quotas.max_queued:
            return TooManyRequests(
                f"the tenant may have {quotas.max_queued} runs that wait to start and has {used.queued}",
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
        used.queued += runs
        return None

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
