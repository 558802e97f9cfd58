"""The compactor: makes few large segments of many small ones, and removes what they have replaced; and payloads that
nobody needs any more."""

from __future__ import annotations

import random
import time

from tocsin.flow import compact, payloads
from tocsin.node.loop import Loop
from tocsin.store.db import Database
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import LOOP_ERRORS, get_logger

log = get_logger("compactor")
_PAUSE = 30.0
_SWEEP_SECONDS = 3600.0  # it lists folders, which costs something in a store behind a URL


class Compactor(Loop):
    """Every half minute. Nodes that come upon the same segments do it twice, and one of them for nothing: therefore
    they begin with different tenants."""

    name = "compactor"

    def __init__(self, db: Database, objects: ObjectStore) -> None:
        super().__init__()
        self._db, self._objects = db, objects
        self._rng = random.Random()
        self._swept_at = time.monotonic()

    async def run_once(self) -> float:
        tenants = await compact.tenants(self._db)
        self._rng.shuffle(tenants)
        done = 0
        for tenant_id in tenants:
            done += await self._compact(tenant_id)
        # A step that fails must not keep the other steps from running.
        failed: Exception | None = None
        for step in (compact.clean, payloads.clean, self._sweep):
            try:
                done += await step(self._db, self._objects)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return 0.0 if done else self._rng.uniform(0.5, 1.5) * _PAUSE

    async def _sweep(self, db: Database, objects: ObjectStore) -> int:
        if time.monotonic() - self._swept_at > _SWEEP_SECONDS:
            self._swept_at = time.monotonic()
            await compact.sweep(db, objects)
        return 0

    async def _compact(self, tenant_id: int) -> int:
        """What cannot be read of one tenant's keeps nothing of the others' back."""
        try:
            return await compact.compact(self._db, self._objects, tenant_id)
        except Exception as error:
            LOOP_ERRORS.labels(self.name).inc()
            log.warning(
                "a tenant's logs cannot be compacted", tenant=tenant_id, error=f"{type(error).__name__}: {error}"
            )
            return 0
