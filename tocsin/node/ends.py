"""The ends of attempts, those that many workers tell at the same moment in one commit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from tocsin.flow.report import Ending, Reported, report, set_apart, weigh
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.specs import SpecBook
from tocsin.flow.shared.transitions import Hint
from tocsin.model.access import Identity
from tocsin.model.masks import Mask
from tocsin.model.retry import RetryBudgets
from tocsin.node.group import GroupCommit
from tocsin.store.db import Database
from tocsin.wire import Completion, Finished, RunError

_MOST = 20  # reports in one commit
_UNTIL_NOW = 1e11  # milliseconds: longer than any attempt, and no attempt ends after now


class Ends:
    """Takes them in, and tells the loops what follows. `patience`: how many seconds a worker waits for its answer
    without any harm."""

    def __init__(
        self,
        db: Database,
        specs: SpecBook,
        parcels: Parcels,
        budgets: RetryBudgets,
        hint: Callable[[Sequence[Hint]], None],
        patience: float,
    ) -> None:
        self._db, self._specs, self._parcels, self._budgets = db, specs, parcels, budgets
        self._hint, self._patience = hint, patience
        self._rng = random.Random()
        self.on_filled: Callable[[], None] = lambda: None  # a run of a backfill may have ended
        self.on_heads: Callable[[], None] = lambda: None  # a workflow run may have come to its end
        self.on_folded: Callable[[], None] = lambda: None  # a mapped node waits for a large result
        self._commits: GroupCommit[list[Ending], Reported] = GroupCommit(self._commit, _MOST)

    async def add(self, endings: list[Ending]) -> Reported:
        """End these attempts. The result covers all attempts of the same commit. Each caller stores its large results
        before it joins the commit, so that no other caller waits for them."""
        if weigh([e.finished for e in endings]):
            endings = await set_apart(self._db, self._parcels, endings, self._patience)
        return await self._commits.add(endings)

    async def _commit(self, batches: Sequence[list[Ending]]) -> list[Reported]:
        keys = [(e.finished.run_id, e.finished.fence) for batch in batches for e in batch]
        if len(batches) > 1 and len(set(keys)) < len(keys):
            # Two workers tell the end of one attempt: each is to hear what became of its own word.
            return [(await self._commit([batch]))[0] for batch in batches]
        endings = [e for batch in batches for e in batch]
        done: Reported = await report(self._db, self._specs, endings, self._rng, budgets=self._budgets)
        if done.hints:
            self._hint(done.hints)
        if done.fills:
            self.on_filled()
        if done.heads:
            self.on_heads()
        if done.folded:
            self.on_folded()
        return [done] * len(batches)


def completed(who: Identity, attempt: int, body: Completion, mask: Mask | None) -> Finished:
    """Return the end of an attempt that was reported with the attempt's own token."""
    error, result = body.error, body.result
    if mask is not None:
        error = error and msgspec.structs.replace(
            error, class_=mask.text(error.class_), message=mask.text(error.message)
        )
        result = mask.value(result)
    return Finished(
        run_id=who.key_id,
        attempt=attempt,
        fence=who.fence,
        tenant=who.tenant_id,
        outcome=body.outcome,
        ran_ms=_UNTIL_NOW,
        error=None if error is None else RunError(class_=error.class_, message=error.message),
        result=result,
    )
