"""Which tenants may start more: those that are not suspended and have room under their quota of running runs
(`max_running`), if they have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from tocsin.flow import claim
from tocsin.flow.claim import Share
from tocsin.node.loop import Pace
from tocsin.store.db import Database

RECOUNT = 0.05  # seconds between counts of what runs, while a tenant is held back


class RunningQuotas:
    """How many runs may run at once, of the tenants that have a quota for it. Soft: counted now and then, and what this
    node has handed out since then is added; what other nodes did meanwhile is not known."""

    def __init__(self) -> None:
        self._max: dict[int, int] = {}
        self._suspended: set[int] = set()
        self._room: dict[int, int] = {}
        self._stale = False
        self._counts = Pace()
        self.full: set[int] = set()  # who has something to run, and no room for it

    def know(self, tenants: Mapping[int, claim.Terms]) -> None:
        """Who has such a quota, or is suspended. What was counted is old by now."""
        self._suspended = {tenant for tenant, terms in tenants.items() if terms.suspended}
        self._max = {tenant: terms.max_running for tenant, terms in tenants.items() if terms.max_running is not None}
        self._room = {tenant: room for tenant, room in self._room.items() if tenant in self._max}
        self._stale, self.full = True, set()

    async def within(self, db: Database, places: dict[tuple[int, int], datetime]) -> dict[tuple[int, int], datetime]:
        """The places of those who have room."""
        if self._suspended:
            places = {key: floor for key, floor in places.items() if key[1] not in self._suspended}
        bound = {tenant for _, tenant in places if tenant in self._max}
        if bound:
            await self._count(db, bound)
            self.full = (self.full - bound) | {tenant for tenant in bound if self._room[tenant] <= 0}
        return {key: floor for key, floor in places.items() if key[1] not in self.full} if self.full else places

    async def _count(self, db: Database, tenants: set[int]) -> None:
        wanted = self._stale or any(self._room.get(tenant, 0) <= 0 for tenant in tenants)
        if tenants <= self._room.keys() and not (wanted and self._counts.due(RECOUNT)):
            return
        self._counts.begin()
        running = await claim.running(db, sorted(tenants))
        self._counts.end()
        self._room |= {tenant: self._max[tenant] - running.get(tenant, 0) for tenant in tenants}
        self._stale = False

    def capped(self, shares: Iterable[Share]) -> list[Share]:
        """These shares, as far as there is room for them."""
        room, out = dict(self._room), []
        for share in shares:
            most = min(share.most, room.get(share.tenant_id, share.most))
            if most > 0:
                out.append(share._replace(most=most))
                if share.tenant_id in room:
                    room[share.tenant_id] -= most
        return out

    def charge(self, tenant: int, count: int) -> None:
        """So many more were handed out."""
        if tenant in self._room:
            self._room[tenant] -= count
