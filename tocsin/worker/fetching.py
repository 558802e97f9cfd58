"""Runs that came without their arguments, their parents' results or their job's content: fetched one by one.

Each run waits for its own parts only, so that a slow payload delays nobody else. Until its parts are here a run takes
a slot, but it is not started: it can be handed back like one that waits for its instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tocsin.wire import ClaimAnswer, ClaimedRun, RunKey
from tocsin.worker.link import Link, Unreachable
from tocsin.worker.targets import Spec, filled, read_spec

_WITHIN = 30.0  # seconds for each part
Specs = dict[str, Spec | str]  # by reference: what jobs say, or why that cannot be read


class Fetching:
    """The runs that are waited for. `arrived` gets each of them with its job's spec, or with why it has none; if that
    fails, `broken` is told."""

    def __init__(
        self, link: Link, arrived: Callable[[ClaimedRun, Spec | str], None], broken: asyncio.Future[None]
    ) -> None:
        self._link, self._arrived, self._broken = link, arrived, broken
        self._tasks: dict[RunKey, tuple[ClaimedRun, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def keys(self) -> list[RunKey]:
        """The runs that are waited for."""
        return list(self._tasks)

    def begin(self, answer: ClaimAnswer, specs: Specs) -> list[ClaimedRun]:
        """Begin to fetch what did not come with its run; return the runs that are whole."""
        contents = {ref: asyncio.ensure_future(self._content(answer, ref)) for ref in answer.contents}
        whole = []
        for run in answer.runs:
            key, content = (run.run_id, run.fence), contents.get(run.spec_ref or "")
            if run.args_url is None and run.parents_url is None and content is None:
                whole.append(run)
            elif key not in self._tasks:
                self._tasks[key] = run, asyncio.ensure_future(self._whole(run, content or spec_of(run, specs)))
        return whole

    def drop(self, key: RunKey) -> ClaimedRun | None:
        """Give up a run, and return it if it was waited for."""
        run, task = self._tasks.pop(key, (None, None))
        if task is not None:
            task.cancel()
        return run

    def drop_all(self) -> list[RunKey]:
        """Give up all runs that are waited for; which they were."""
        dropped = self.keys
        for key in dropped:
            self.drop(key)
        return dropped

    async def _whole(self, run: ClaimedRun, spec: asyncio.Task[Spec | str] | Spec | str) -> None:
        key, what = (run.run_id, run.fence), "arguments"
        try:
            if run.args_url is not None:
                run.args = await self._link.fetch(run.args_url, run.args_sha256, _WITHIN)
            what = "parents' results"
            if run.parents_url is not None:
                run.parents = await self._link.fetch_parents(run.parents_url, run.token, _WITHIN)
            # Runs of one job share the task; one of them that is given up must not take it from the others.
            found = await asyncio.shield(spec) if isinstance(spec, asyncio.Task) else spec
        except Unreachable as exc:
            found = f"its {what} could not be fetched: {exc}"
        except Exception as exc:  # odd data of one run, which is to end
            found = f"what it needs cannot be read: {type(exc).__name__}"
        del self._tasks[key]
        try:
            self._arrived(run, found)
        except Exception as exc:  # nobody awaits this task
            if not self._broken.done():
                self._broken.set_exception(exc)

    async def _content(self, answer: ClaimAnswer, ref: str) -> Spec | str:
        """What a job itself says, once for all its runs."""
        try:
            parts = answer.contents[ref].items()
            told = {name: await self._link.fetch(part.url, part.sha256, _WITHIN) for name, part in parts}
            return read_spec(filled(answer.specs[ref], told))
        except Unreachable as exc:
            return f"what its job says could not be fetched: {exc}"


def spec_of(run: ClaimedRun, specs: Specs) -> Spec | str:
    """The spec of a run's job: that of its reference, or the one that came with the run."""
    return specs[run.spec_ref] if run.spec_ref is not None and run.spec_ref in specs else read_spec(run.spec)
