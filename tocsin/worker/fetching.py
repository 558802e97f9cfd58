"""Fetch missing parts of claimed runs: arguments, parents' results or job content.

Each run waits only for its own parts, so that a slow payload does not delay other runs. Until its parts are here a run
takes a slot but is not started: it can be handed back like a run that waits for its instant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tocsin.wire import ClaimAnswer, ClaimedRun, RunKey
from tocsin.worker.link import Link, Unreachable
from tocsin.worker.targets import Spec, filled, read_spec

_WITHIN = 30.0  # seconds for each part
Specs = dict[str, Spec | str]  # by reference: job specs, or why a spec cannot be read


class Fetching:
    """The runs whose parts are being fetched. `arrived` gets each run with its job's spec, or with the reason why it
    has none. If `arrived` fails, `broken` gets the exception."""

    def __init__(
        self, link: Link, arrived: Callable[[ClaimedRun, Spec | str], None], broken: asyncio.Future[None]
    ) -> None:
        self._link, self._arrived, self._broken = link, arrived, broken
        self._tasks: dict[RunKey, tuple[ClaimedRun, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def keys(self) -> list[RunKey]:
        """Return the runs whose parts are being fetched."""
        return list(self._tasks)

    def begin(self, answer: ClaimAnswer, specs: Specs) -> list[ClaimedRun]:
        """Begin to fetch the missing parts. Return the runs that are complete."""
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
        """Stop fetching for a run. Return the run if it was being fetched."""
        run, task = self._tasks.pop(key, (None, None))
        if task is not None:
            task.cancel()
        return run

    def drop_all(self) -> list[RunKey]:
        """Stop fetching for all runs. Return their keys."""
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
            # Runs of one job share the task: if one run is dropped, the task must continue for the others.
            found = await asyncio.shield(spec) if isinstance(spec, asyncio.Task) else spec
        except Unreachable as exc:
            found = f"its {what} could not be fetched: {exc}"
        except Exception as exc:  # unusual data of one run, which must end
            found = f"what it needs cannot be read: {type(exc).__name__}"
        del self._tasks[key]
        try:
            self._arrived(run, found)
        except Exception as exc:  # no caller awaits this task
            if not self._broken.done():
                self._broken.set_exception(exc)

    async def _content(self, answer: ClaimAnswer, ref: str) -> Spec | str:
        """Return the content of a job, fetched once for all its runs."""
        try:
            parts = answer.contents[ref].items()
            told = {name: await self._link.fetch(part.url, part.sha256, _WITHIN) for name, part in parts}
            return read_spec(filled(answer.specs[ref], told))
        except Unreachable as exc:
            return f"what its job says could not be fetched: {exc}"


def spec_of(run: ClaimedRun, specs: Specs) -> Spec | str:
    """Return the spec of a run's job: by its reference, or the one that came with the run."""
    return specs[run.spec_ref] if run.spec_ref is not None and run.spec_ref in specs else read_spec(run.spec)
