"""What must hold over the whole life of a world, whoever does what at the same time.

The reference says what one step does alone. These rules need no such knowledge: they hold a book to the one before it,
to all fences that were ever handed out, and to what the schedules owe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta

from tests.simulation.book import HELD, UNHELD, Book, Ended, Job, Limit, Run
from tests.simulation.pieces import HEAD_START, LOSS_BUDGET, NO_BOUND, must, owed
from tocsin.wire import decode_job_spec

HAIR = timedelta(milliseconds=5)


class Ledger:
    """Remembers the highest fence and the last claim of each run."""

    def __init__(self) -> None:
        self._fences: dict[str, int] = {}
        self._claims: dict[str, int] = {}

    def check(self, before: Book, after: Book) -> None:
        """Raise `Broken` if one of the promises is."""
        self._check_fences(after)
        _check_history(before, after)
        _check_limits(before, after)
        for job in after.jobs.values():
            _check_job(job, after)
            if job.step is not None:
                _check_occurrences(job, after)
            elif job.spec.once:
                _check_one_time(job, after)

    def _check_fences(self, after: Book) -> None:
        for run in after.runs.values():
            known = self._fences.get(run.id, 0)
            if run.claim_id is not None and run.claim_id != self._claims.get(run.id):
                must(run.fence > known, f"{run.id} was claimed again under fence {run.fence}, after {known}")
                self._claims[run.id] = run.claim_id
            must(run.fence >= known, f"the fence of {run.id} fell from {known} to {run.fence}")
            self._fences[run.id] = run.fence


def _check_history(before: Book, after: Book) -> None:
    """One row for each attempt that ended, none ever changes, and after the last there is nothing."""
    for key, row in before.history.items():
        must(after.history.get(key) == row, f"history of {key} was changed")
    finals = Counter(row.run for row in after.history.values() if row.final)
    for run_id, times in finals.items():
        must(times == 1, f"{run_id} ended {times} times")
        must(run_id not in after.runs, f"{run_id} has ended and lives")
    rows: dict[str, list[Ended]] = {}
    for row in after.history.values():
        rows.setdefault(row.run, []).append(row)
    for run in after.runs.values():
        _check_tries(run, rows.get(run.id, []))
        # Those that were made together stand a hair apart; one that lost its worker keeps its place.
        place = run.ready_at - (run.priority - 500) * HEAD_START
        kept = run.losses > 0 and run.order_key < place
        must(kept or place <= run.order_key < place + HAIR, f"{run.id} stands at {run.order_key}, not at {place}")
    for run in before.runs.values():
        if run.id not in after.runs and run.id not in finals:
            unmade = run.trigger == "schedule" and run.attempt == 0 and run.state in UNHELD
            must(unmade, f"{run.id} is gone without a trace")
    died = {row.run for row in after.history.values() if row.final and row.state == "dead"}
    must(after.dead <= died, f"dead letters of runs that did not die: {after.dead - died}")
    new = {row.run for key, row in after.history.items() if key not in before.history and row.state == "dead"}
    must(new <= after.dead | before.dead, f"died without a letter: {new - after.dead}")


def _check_tries(run: Run, rows: list[Ended]) -> None:
    outcomes = Counter(row.outcome for row in rows)
    must(run.failures == outcomes["failed"] + outcomes["timeout"], f"{run.id}: {run.failures} failures, {outcomes}")
    must(run.losses == outcomes["lost"], f"{run.id}: {run.losses} losses, {outcomes}")
    must(run.failures < run.max_attempts and run.losses < LOSS_BUDGET, f"{run.id} has no tries left, and lives")
    must(len(rows) <= run.attempt, f"{run.id}: {len(rows)} rows for {run.attempt} attempts")


def _check_job(job: Job, after: Book) -> None:
    must(job.on_hold == (job.state == "paused"), f"{job.id} is {job.state}, on hold: {job.on_hold}")
    must(job.cursor is None or job.state == "active", f"{job.id} is {job.state} and has a cursor")
    must(job.held_at is None or job.state == "paused", f"{job.id} is {job.state} and holds its cursor")
    for run in after.runs_of(job.id):
        if job.state == "cancelled":
            must(
                (run.state in HELD and run.stop_reason is not None) or run.origin is not None,
                f"{run.id} outlives its job",
            )


def _check_limits(before: Book, after: Book) -> None:
    """Nothing starts where a limit has no room, and no rate is ever exceeded. A limit that was lowered lets what runs
    come to its end, and one that is new binds the runs made from then on."""
    begun = [run for run in after.runs.values() if run.state in HELD and not _was_held(run, before)]
    started = [run for run in begun if run.limited]
    for key in {key for run in started for key in (run.job, run.key) if key is not None}:
        mine = [run for run in started if key in (run.job, run.key)]
        bound = max(_bound(key, run, book) for run in mine for book in (before, after))
        running = after.running(key)
        must(running <= max(bound, before.running(key)), f"{running} run at once under {key}, {bound} may")
    for key, limit in after.limits.items():
        was = before.limits.get(key)
        if was is not None and was.tat is not None:
            must(limit.tat is not None and limit.tat >= was.tat, f"the rate of {key} was set back")
        _check_rate(key, limit, [run for run in started if (run.key or run.job) == key], before, after)


def _was_held(run: Run, before: Book) -> bool:
    known = before.runs.get(run.id)
    return known is not None and known.claim_id == run.claim_id


def _bound(key: str, run: Run, book: Book) -> int:
    """How many may run with this one under a limit."""
    if key == run.job:
        return book.limits[key].max if key in book.limits else 0
    shared = book.jobs[run.job].spec.shared_key if run.job in book.jobs else None
    return shared.max if shared is not None else NO_BOUND


def _check_rate(key: str, limit: Limit, started: list[Run], before: Book, after: Book) -> None:
    """Each start has moved the rate's instant on by its gap, and it is never more than a burst ahead."""
    rates = [b.jobs[r.job].spec.rate for r in started for b in (before, after) if r.job in b.jobs]
    known = [rate for rate in rates if rate is not None]
    if not started or not known or None in rates:
        return
    assert limit.tat is not None
    was = before.limits[key].tat if key in before.limits else None
    used = limit.tat - max(was or before.now, before.now)
    must(used >= len(started) * min(rate.gap for rate in known), f"{len(started)} went by {key}, which moved by {used}")
    ahead = max(rate.gap * rate.burst for rate in known)
    must(limit.tat <= after.now + ahead, f"the rate of {key} is used up to {limit.tat}")


def _check_one_time(job: Job, after: Book) -> None:
    """One that is open has its one occurrence still before it, or has it alive."""
    places = (job.cursor is not None) + (job.held_at is not None) + sum(run.once for run in after.runs_of(job.id))
    must(places == (1 if job.open else 0) or not job.open, f"{job.id} is {job.state} and has {places} occurrences")


# ── each occurrence once ─────────────────────────────────────────────────────────────────────────────────────────


def _check_occurrences(job: Job, after: Book) -> None:
    """Each instant that was owed and that the cursor has passed has one run, or a share in one counted row."""
    due = Counter(_owed(job, after))
    ended = [row for row in after.history.values() if row.job == job.id and row.trigger == "schedule" and row.final]
    singles = Counter(row.scheduled_for for row in ended if row.first_for is None)
    singles.update(run.scheduled_for for run in after.runs_of(job.id) if run.trigger == "schedule")
    for at, times in singles.items():
        must(times == 1, f"{job.id}: the occurrence of {at} has {times} runs")
        must(at in due or _was_taken_ahead(job, at, after), f"{job.id}: a run stands for {at}, which is not owed")
    # A pause may count what lies before something that was taken ahead; if the job ends before it, it was not owed.
    counted = sum(
        row.count for row in ended if row.first_for is not None and not _was_taken_ahead(job, row.first_for, after)
    )
    uncovered = [at for at in due if at not in singles]
    told = ", ".join(f"{row.reason} {row.first_for}…{row.scheduled_for}: {row.count}" for row in ended if row.first_for)
    must(
        len(uncovered) == counted,
        f"{job.id}: {len(uncovered)} occurrences have no run ({', '.join(map(str, uncovered[:3]))} …), "
        f"{counted} are counted as not run ({told})",
    )


def _owed(job: Job, after: Book) -> Iterator[datetime]:
    """The instants of each version, as far as they must be accounted for by now."""
    start: datetime | None = None
    tick = timedelta(microseconds=1)
    for version in after.replaced.get(job.id, ()):
        if version.owed_until is None:
            continue
        assert version.successor_after is not None
        yield from _between(version.text, version.anchor, start, version.owed_until)
        start = version.successor_after
    stands = job.cursor or job.held_at
    end = stands - tick if stands is not None else job.ended_at
    if end is not None:
        yield from _between(job.text, job.anchor, start, end)


def _between(text: str, anchor: datetime, after: datetime | None, until: datetime) -> list[datetime]:
    schedule = decode_job_spec(text).schedule
    assert schedule is not None and schedule.every is not None
    return [
        at for at in owed(anchor + schedule.every.delta, schedule.every.delta, until) if after is None or at > after
    ]


def _was_taken_ahead(job: Job, at: datetime, after: Book) -> bool:
    """Staged or handed out before its instant, and then the schedule was changed or ended."""
    if job.ended_at is not None and at > job.ended_at:
        return True
    return any(
        v.owed_until is not None and v.successor_after is not None and v.owed_until < at <= v.successor_after
        for v in after.replaced.get(job.id, ())
    )
