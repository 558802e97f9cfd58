"""What the steps of the reference are made of: making, recording, ending and releasing runs, as SEMANTICS.md says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tests.simulation.book import Book, Ended, Job, Limit, Run
from tocsin.model.job import JobSpec
from tocsin.model.limits import key_id

LATE = timedelta(seconds=60)
HEAD_START = timedelta(milliseconds=20)
LOSS_BUDGET = 3
SUSPECT = timedelta(seconds=10)  # how long a lost run that could run again stays a suspect
LOSS_DELAY = timedelta(seconds=0.5)
NO_BOUND = 2**31 - 1


class End(NamedTuple):
    """An attempt's end as a worker tells it."""

    worker: str
    run: str
    attempt: int
    fence: int
    outcome: str
    poison: bool = False


class Broken(AssertionError):
    """The product did what the reference does not allow."""


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def first_of(rows: Iterable[Run], taken: Iterable[Run], key: Callable[[Run], Any], what: str) -> None:
    """Those taken stand before all that were left, in the order of `key`."""
    taken = list(taken)
    ids = {run.id for run in taken}
    left = [run for run in rows if run.id not in ids]
    if taken and left:
        must(max(map(key, taken)) <= min(map(key, left)), f"{what}: one behind was taken before one in front")


def owed(first: datetime, step: timedelta | None, until: datetime) -> list[datetime]:
    """The instants from a cursor up to and including `until`; without a step there is but one."""
    out = []
    while first <= until:
        out.append(first)
        if step is None:
            break
        first += step
    return out


def limits_of(spec: JobSpec) -> tuple[Any, ...]:
    return spec.max_concurrency, spec.concurrency_key, spec.rate_limit


def has_limits(spec: JobSpec) -> bool:
    return limits_of(spec) != (None, None, None)


class Pieces:
    """One step: the book before it, the one that the product left, and the one that it should have left."""

    def __init__(self, before: Book, got: Book, now: datetime, horizon: timedelta, tenant: int) -> None:
        self.now, self.horizon, self.tenant = now, horizon, tenant
        self.before, self.got = before, got
        self.want = before.copy()
        self._bounds: dict[str, int] = {}  # of keys whose runs were made in this step

    # ── what steps are made of ───────────────────────────────────────────────────────────────────────────────────

    def make_run(
        self,
        job: Job,
        trigger: str,
        scheduled_for: datetime | None,
        priority: int | None = None,
        origin: str | None = None,
        args: str | None = None,
    ) -> None:
        """→ staged | ready; an occurrence that lives already is not made twice."""
        at = scheduled_for or self.now
        if trigger == "schedule" and any(
            r.trigger == "schedule" and r.scheduled_for == at for r in self.want.runs_of(job.id)
        ):
            return
        ready_at = max(at, self.now)
        spec, rank = job.spec, priority if priority is not None else job.spec.priority
        self.want.new_runs.append(
            Run(
                id="",
                job=job.id,
                version=job.version,
                state="staged" if ready_at > self.now else "ready",
                trigger=trigger,
                priority=rank,
                scheduled_for=at,
                ready_at=ready_at,
                order_key=ready_at - (rank - 500) * HEAD_START,
                deadline_at=None if spec.start_deadline is None else ready_at + spec.start_deadline.delta,
                attempt=0,
                failures=0,
                losses=0,
                max_attempts=spec.retry.max_attempts,
                fence=0,
                claim_id=None,
                worker=None,
                blocked_by=None,
                blocked_key=None,
                stop_reason=None,
                overlap=None if spec.once or spec.overlap == "allow" else spec.overlap,
                limited=has_limits(spec),
                once=spec.once and trigger == "schedule",
                origin=origin,
                args=args,
                key=self._key(spec, args),
            )
        )

    def _key(self, spec: JobSpec, args: str | None) -> str | None:
        """The concurrency key of a run; the last to make one says how many of it may run."""
        if spec.shared_key is None:
            return None
        customer = "" if args is None else args.split('"')[3]
        key = key_id(self.tenant, spec.shared_key.key.replace("{args.customer}", customer))
        self._bounds[key] = max(self._bounds.get(key, 0), spec.shared_key.max)
        known = self.want.limits.get(key)
        self.want.limits[key] = Limit(self._bounds[key], known and known.tat)
        return key

    def miss(self, job: Job, reason: str, instants: Sequence[datetime]) -> None:
        """One counted row for occurrences that get no run."""
        if instants:
            self.want.new_rows.append(
                Ended(
                    run="",
                    attempt=1,
                    job=job.id,
                    version=job.version,
                    final=True,
                    state="skipped",
                    outcome=None,
                    reason=reason,
                    count=len(instants),
                    fence=0,
                    trigger="schedule",
                    priority=job.spec.priority,
                    failures=0,
                    losses=0,
                    first_for=instants[0],
                    scheduled_for=instants[-1],
                    worker=None,
                    origin=None,
                    args=None,
                )
            )

    def record(self, run: Run, attempt: int, state: str, final: bool, **more: Any) -> None:
        self.want.history[run.id, attempt] = Ended(
            run=run.id,
            attempt=attempt,
            job=run.job,
            version=run.version,
            final=final,
            state=state,
            outcome=more.get("outcome"),
            reason=more.get("reason"),
            count=1,
            fence=run.fence,
            trigger=run.trigger,
            priority=run.priority,
            failures=run.failures,
            losses=run.losses,
            first_for=None,
            scheduled_for=run.scheduled_for,
            worker=more.get("worker"),
            origin=run.origin,
            args=run.args,
        )

    def leave(self, run: Run) -> None:
        """A run is gone from the live ones; a one-time job has ended with it."""
        del self.want.runs[run.id]
        job = self.want.jobs[run.job]
        if run.once and job.open:
            job.state, job.ended_at, job.on_hold = "completed", self.now, False

    def end_unheld(self, run: Run, state: str, reason: str) -> None:
        self.record(run, run.attempt + 1, state, True, reason=reason)
        self.leave(run)

    def release(self, keys: Iterable[str]) -> None:
        """waiting → ready: as many as the limit has room for and its rate allows, less the runs that were released and
        have not started; and the first run of a job, if it waits for an earlier one."""
        for key in set(keys):
            limit = self.want.limits.get(key)
            room = 1000 if limit is None else max(0, limit.max - self.want.running(key))
            let_go = sum(run.state == "ready" and run.blocked_key == key for run in self.want.runs.values())
            for why, most in (("limit", {room}), ("rate", self._rooms(key))):
                waiting = [r for r in self.want.runs.values() if r.blocked_by == why and r.blocked_key == key]
                chosen = [run for run in waiting if self._seen(run).blocked_by != why]
                allowed = {min(max(0, some - let_go), len(waiting)) for some in most}
                must(len(chosen) in allowed, f"{len(chosen)} of {len(waiting)} released by {why}, not {allowed}")
                first_of(waiting, chosen, lambda run: (run.order_key, run.id), f"release by {why}")
                for run in chosen:
                    run.state, run.blocked_by = "ready", None
            alive = [r for r in self.want.runs_of(key) if r.state != "staged" or r.ready_at <= self.now or r.attempt]
            first = min(alive, key=lambda run: run.id, default=None)
            if first is not None and first.blocked_by == "overlap":
                first.state, first.blocked_by, first.blocked_key = "ready", None, None

    def _rooms(self, key: str) -> set[int]:
        """How many a rate lets through. Jobs may have different ones for one key: that of the first counts."""
        waiting = [run for run in self.want.runs.values() if run.blocked_by == "rate" and run.blocked_key == key]
        first = min((run.order_key for run in waiting), default=None)
        jobs = {run.job for run in waiting if run.order_key == first}
        return {self._tokens(key, self.want.jobs[job].spec) for job in jobs} or {0}

    def _tokens(self, key: str, spec: JobSpec) -> int:
        if spec.rate is None:
            return 1000
        limit = self.want.limits.get(key)
        ahead = timedelta(0) if limit is None or limit.tat is None else max(timedelta(0), limit.tat - self.now)
        used = -(-ahead // spec.rate.gap)  # a token that has come in part has not come
        return max(0, spec.rate.burst - used)

    def gates(self, run: Run) -> set[str]:
        """The limits that a run is under."""
        return {run.job} if run.key is None else {run.job, run.key}

    def _seen(self, run: Run) -> Run:
        found = self.got.runs.get(run.id)
        must(found is not None, f"run {run.id} is gone")
        assert found is not None
        return found

    def audit(self, action: str, target: str) -> None:
        self.want.audit[action, target] += 1
