"""What each step is to do, written down a second time: plainly, one run after the other, from SEMANTICS.md.

A step of the reference changes `want`, a copy of the book from before. Where the product may choose (which of several
runs that are equal in order goes first, which of them gets the last slot) the choice is read from `got`, the book that
the product left behind, and held to the rule that it had to follow.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from tests.simulation.book import HELD, UNHELD, Book, Ended, Job, Limit, Run, Worker
from tests.simulation.pieces import (
    HEAD_START,
    LATE,
    LOSS_BUDGET,
    LOSS_DELAY,
    NO_BOUND,
    SUSPECT,
    End,
    Pieces,
    has_limits,
    limits_of,
    must,
    owed,
)
from tocsin.flow import plan
from tocsin.model.job import JobSpec
from tocsin.wire import encode


class Reference(Pieces):
    """What each step does with the pieces."""

    # ── submit ───────────────────────────────────────────────────────────────────────────────────────────────────

    def submit_job(self, job_id: str, spec: JobSpec) -> None:
        schedule = spec.schedule
        job = Job(job_id, "active", 1, self.now, None, None, False, None, encode(spec).decode())
        self.want.jobs[job_id] = job
        if has_limits(spec):
            self.want.limits[job_id] = Limit(spec.max_concurrency or NO_BOUND, None)
        if schedule is None:
            self.make_run(job, "schedule", None)
        elif schedule.every is not None:
            job.cursor = self.now + schedule.every.delta
        elif schedule.at is not None and max(schedule.at.at, self.now) <= self.now + self.horizon:
            self.make_run(job, "schedule", schedule.at.at)
        elif schedule.at is not None:
            job.cursor = schedule.at.at
        self.audit("job.create", f"job:{job_id}")

    def submit_runs(self, job_id: str, asked: Sequence[tuple[datetime | None, int | None]], args: str | None) -> None:
        job = self.want.jobs[job_id]
        for at, priority in asked:
            self.make_run(job, "api", at, priority, args=args)
        self.audit("run.create", f"job:{job_id}")

    # ── plan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def plan(self) -> None:
        for job in self.want.jobs.values():
            if job.cursor is not None and job.cursor <= self.now + self.horizon:
                self._plan_job(job, job.cursor)

    def _plan_job(self, job: Job, cursor: datetime) -> None:
        """Plan one occurrence after the other, as many as a cursor may have in a turn. The misfire rule applies to
        those of an outage that is not judged yet; the others are staged."""
        kept_until = self.before.kept_until.get(job.id)
        most = plan.PIECE if kept_until is None else plan.LARGE_PIECE
        left = owed(cursor, job.step, self.now + self.horizon)
        job.cursor = None if job.step is None else left[-1] + job.step
        staged: list[datetime] = []
        while left and len(staged) < most:
            at = left[0]
            outage = next((o for o in self._outages() if o[0] <= at < o[1]), None)
            if outage is None or (kept_until is not None and at < kept_until):
                staged.append(left.pop(0))
                continue
            late = [at for at in left if at < outage[1]]
            left = self._rescue(job, late, outage[1]) + left[len(late) :]
            kept_until = outage[1]
        for at in staged:
            self.make_run(job, "schedule", at)
        if left:
            job.cursor = left[0]
        elif job.cursor is None and not staged:
            job.state, job.ended_at = "completed", self.now

    def _outages(self) -> list[tuple[datetime, datetime]]:
        """Return the times of more than a minute without a turn, including the one that ends now."""
        turned_at = self.before.turned_at
        if turned_at is None or self.now - turned_at <= LATE:
            return self.before.outages
        return [*(o for o in self.before.outages if o[0] != turned_at), (turned_at, self.now)]

    def _rescue(self, job: Job, late: list[datetime], end: datetime) -> list[datetime]:
        """Return the occurrences of an outage that run all the same. The others are counted."""
        schedule = job.spec.schedule
        assert schedule is not None
        rule = schedule.misfire
        young = [at for at in late if at >= end - rule.window.delta]
        most = {"latest": 1, "all": rule.max, "skip": 0}[rule.policy]
        rescued = young[max(0, len(young) - most) :] if most else []
        if rule.policy == "latest":
            self.miss(job, "misfire_expired", late[: len(late) - len(young)])
            self.miss(job, "coalesced", young[: len(young) - len(rescued)])
        else:
            self.miss(job, "misfire_expired", late[: len(late) - len(rescued)])
        return rescued

    # ── claim ────────────────────────────────────────────────────────────────────────────────────────────────────

    def is_due(self, run: Run) -> bool:
        """Alive for those behind it; what is staged for the future is not."""
        return run.state != "staged" or run.ready_at <= self.now or run.attempt > 0

    def is_unjudged(self, run: Run) -> bool:
        """Return whether an occurrence is more than a minute late and no worker vouches for its lane for all that
        time."""
        late = run.state == "staged" and run.trigger == "schedule" and run.attempt == 0
        if not late or run.ready_at >= self.now - LATE:
            return False
        voucher = self.before.voucher
        return not (voucher and self._lives(voucher) and self.before.lives[voucher][0] <= run.ready_at + LATE)

    def is_misfire(self, run: Run) -> bool:
        """Return whether no worker was there for a minute from the run's instant on."""
        lives = self.before.lives.values()
        return not any(start <= run.ready_at + LATE and end >= run.ready_at for start, end in lives)

    def is_expired(self, run: Run) -> bool:
        return run.deadline_at is not None and run.deadline_at < self.now and run.attempt == 0

    def in_front(self, run: Run, book: Book) -> list[Run]:
        """The earlier runs of its job that block an occurrence."""
        return [e for e in book.runs_of(run.job) if e.id < run.id and self.is_due(e)]

    def verdict(self, run: Run, book: Book) -> str:
        if book.jobs[run.job].on_hold:
            return "paused"
        if self.is_expired(run):
            return "expired"
        ahead = self.in_front(run, book)
        if run.overlap is None or run.trigger != "schedule" or run.attempt > 0 or not ahead:
            return "limited" if run.limited else "go"
        if run.overlap == "skip":
            return "skipped_overlap"
        if run.overlap == "replace":
            return "overlap"
        queued = [e for e in ahead if e.trigger == "schedule" and e.attempt == 0 and e.state not in HELD]
        return "coalesced" if run.overlap == "queue" and any(self.in_front(e, book) for e in queued) else "overlap"

    def claim(self, slots: Sequence[str], most: int) -> None:
        """Claim for the one lane of the one tenant. At most `most` of the first runs are examined. If some of these are
        past their deadline, and slots are left, the runs behind them are examined, too."""
        living = Counter(slot for slot in slots if self._lives(slot))
        started, bound, expired = self._look(slots, living, most, self.before, fresh=False)
        if expired and started < len(slots):
            more, bound, _ = self._look(slots, living, most - started, copy.deepcopy(self.want), fresh=True)
            started += more
        if bound and started < len(slots):
            if any(map(self._is_suspect, bound)):
                free = [slot for slot in slots if self._lives(slot)][started:]
                self._claim_with_suspects(bound, living, free, len(slots) - started)
            else:
                self._claim_limited(bound, living, len(slots) - started)
        self.release(self._sweep_away([run for run in expired if run.id in self.want.runs], "expired", "expired"))

    def _look(
        self, slots: Sequence[str], living: Counter[str], most: int, book: Book, *, fresh: bool
    ) -> tuple[int, list[Run], list[Run]]:
        """Do what one statement does. Return how many runs start, and which ones need locks or are past their
        deadline."""
        ready = [r for r in self.want.runs.values() if r.state == "ready" and not (fresh and self.is_expired(r))]
        due = [
            r
            for r in self.want.runs.values()
            if r.state == "staged"
            and r.ready_at <= self.now
            and not self.is_unjudged(r)
            and not (fresh and self.is_expired(r))
        ]
        if all(map(self._holds_suspect, slots)):
            ready, due = ([r for r in runs if not self._is_suspect(r)] for runs in (ready, due))
        seen = self._looked_at(ready, due, most)
        verdicts = {run.id: self.verdict(run, book) for run in seen}
        going = [run for run in seen if verdicts[run.id] == "go" and not self._is_suspect(run)]
        started = self._start(going, living)
        for run in seen:
            match verdicts[run.id]:
                case "paused" | "overlap" as why:
                    run.state, run.blocked_by, run.blocked_key = "waiting", why, run.job
                case "skipped_overlap" | "coalesced" as reason:
                    self.end_unheld(run, "skipped", reason)
                case "expired" if not run.once and not run.limited and run.overlap in (None, "skip", "allow"):
                    self.end_unheld(run, "expired", "expired")
        bound = [run for run in seen if verdicts[run.id] in ("go", "limited") and run not in going]
        return started, bound, [run for run in seen if verdicts[run.id] == "expired"]

    def _is_suspect(self, run: Run) -> bool:
        """Return whether a worker was lost with the run, and the run could run again only recently."""
        return run.losses > 0 and run.ready_at > self.now - SUSPECT

    def _holds_suspect(self, worker: str) -> bool:
        return any(run.worker == worker and run.losses > 0 for run in self.want.runs.values())

    def _claim_with_suspects(self, runs: list[Run], living: Counter[str], free: list[str], slots: int) -> None:
        """Claim as without suspects, but each run takes the first free slot, and a suspect that of a worker without
        another one."""
        held = {worker for worker in free if self._holds_suspect(worker)}
        fits: list[Run] = []
        for run in sorted(runs, key=lambda run: (run.order_key, run.id)):
            if len(fits) == slots:
                break
            blocked = self._blocked_by(run, fits) if run.limited else None
            if blocked is not None:
                run.state, (run.blocked_by, run.blocked_key) = "waiting", blocked
                continue
            suspect = self._is_suspect(run)
            worker = next((worker for worker in free if not (suspect and worker in held)), None)
            if worker is not None:
                free.remove(worker)
                held |= {worker} if suspect else set()
                fits.append(run)
                if run.limited:
                    self._use_token(run)
        must(self._start(fits, living) == len(fits), "who was given a slot starts")

    def _looked_at(self, ready: list[Run], due: list[Run], most: int) -> list[Run]:
        if len(ready) + len(due) <= most:
            return ready + due
        ready.sort(key=lambda run: (run.order_key, self._was_left(run)))
        due.sort(key=lambda run: (run.ready_at, self._was_left(run)))
        return (ready[:most] + due[: max(0, most - len(ready))])[:most]

    def _was_left(self, run: Run) -> int:
        """Of runs that are equal in order those were looked at that were changed; and, before those that would have
        been, those that could have gone, had their worker lived."""
        if self.got.runs.get(run.id) != self.before.runs.get(run.id):
            return 0
        return 1 if self.verdict(run, self.before) in ("go", "limited") else 2

    def _claim_limited(self, runs: list[Run], living: Counter[str], slots: int) -> None:
        """In their order, until the slots are used up (who comes then stays where it is): who finds room under all its
        limits goes, who does not waits for the first that has none."""
        fits: list[Run] = []
        for run in sorted(runs, key=lambda run: (run.order_key, run.id)):
            if len(fits) == slots:
                break
            blocked = self._blocked_by(run, fits)
            if blocked is None:
                fits.append(run)
                self._use_token(run)
            else:
                run.state, (run.blocked_by, run.blocked_key) = "waiting", blocked
        if self._start(fits, living) < len(fits):
            # Somebody was let go whose worker is gone, and used a token: of those equal in order, who was it?
            for key, limit in self.want.limits.items():
                limit.tat = self.got.limits[key].tat

    def _blocked_by(self, run: Run, going: Sequence[Run]) -> tuple[str, str] | None:
        spec, rated = self.want.jobs[run.job].spec, run.key or run.job
        of_job = self.want.running(run.job) + sum(other.job == run.job for other in going)
        if of_job >= self.want.limits[run.job].max:
            return "limit", run.job
        if run.key is not None and spec.shared_key is not None:
            of_key = self.want.running(run.key) + sum(other.key == run.key for other in going)
            if of_key >= spec.shared_key.max:
                return "limit", run.key
        return None if spec.rate is None or self._tokens(rated, spec) else ("rate", rated)

    def _use_token(self, run: Run) -> None:
        """Whoever is let go has used it, though the worker may be gone."""
        rate, limit = self.want.jobs[run.job].spec.rate, self.want.limits[run.key or run.job]
        if rate is not None:
            limit.tat = max(limit.tat or self.now, self.now) + rate.gap

    def _start(self, going: list[Run], living: Counter[str]) -> int:
        """→ running, one for each slot of a worker that lives; which of them, the product chooses."""
        chosen = [run for run in going if self._seen(run).state == "running"]
        must(len(chosen) == min(len(going), living.total()), f"{len(chosen)} of {len(going)} started")
        for run in chosen:
            now = self._seen(run)
            must(now.worker is not None and living[now.worker] > 0, f"{run.id} went to {now.worker}, who has no slot")
            must(now.fence > run.fence, f"the fence of {run.id} went from {run.fence} to {now.fence}")
            living[now.worker or ""] -= 1
            run.state, run.attempt, run.worker = "running", run.attempt + 1, now.worker
            run.fence, run.claim_id, run.blocked_key = now.fence, now.claim_id, None
        return len(chosen)

    def _lives(self, worker_id: str) -> bool:
        worker = self.want.workers.get(worker_id)
        return worker is not None and worker.state != "gone" and worker.lease_until > self.now

    def claim_ahead(self, slots: Sequence[str], lead: timedelta) -> None:
        near = [
            r
            for r in self.want.runs.values()
            if r.state == "staged" and self.now < r.ready_at <= self.now + lead and not (r.limited or r.losses)
        ]
        clear = [r for r in near if not self.before.jobs[r.job].on_hold and not self._blocked_by_then(r)]
        most = len(slots)
        if len(near) > most:
            # The first `most` in order, of which those that nothing blocks go.
            near.sort(key=lambda run: (run.order_key, run.id))
            ids = {run.id for run in near[:most]}
            clear = [run for run in clear if run.id in ids]
        self._start(clear, Counter(slot for slot in slots if self._lives(slot)))

    def _blocked_by_then(self, run: Run) -> bool:
        """Whether an earlier run will be in its way when it falls due."""
        if run.overlap is None or run.trigger != "schedule" or run.attempt > 0:
            return False
        return any(
            e.id < run.id and (e.state != "staged" or e.ready_at <= run.ready_at or e.attempt > 0)
            for e in self.before.runs_of(run.job)
        )

    def promote(self) -> None:
        for run in self.want.runs.values():
            if run.state == "staged" and run.ready_at <= self.now and not self.is_unjudged(run):
                run.state = "ready"

    # ── report, hand back, reap ──────────────────────────────────────────────────────────────────────────────────

    def held(self, worker: str, run_id: str, fence: int) -> Run | None:
        run = self.want.runs.get(run_id)
        if run is None or run.state not in HELD or run.worker != worker or run.fence != fence:
            return None
        return run

    def report(self, ends: Sequence[End]) -> set[tuple[str, int]]:
        """Answers what is accepted."""
        freed: set[str] = set()
        accepted = set()
        for end in {(e.run, e.fence, e.worker): e for e in ends}.values():
            run = self.held(end.worker, end.run, end.fence)
            if run is None:
                known = self.before.history.get((end.run, end.attempt))
                if known and (known.fence, known.worker, known.outcome) == (end.fence, end.worker, end.outcome):
                    accepted.add((end.run, end.fence))
                continue
            accepted.add((end.run, end.fence))
            if run.limited or run.overlap in ("queue", "queue_all", "replace"):
                freed |= self.gates(run)
            self._end_attempt(run, end)
        self.release(freed)
        return accepted

    def _end_attempt(self, run: Run, end: End) -> None:
        run.failures += end.outcome in ("failed", "timeout")
        run.losses += end.outcome == "lost"
        following, delay = self._following(run, end)
        worker = run.worker
        self.record(run, run.attempt, following, following != "staged", outcome=end.outcome, worker=worker)
        if following != "staged":
            self.leave(run)
            if following == "dead":
                self.want.dead.add(run.id)
            return
        run.state, run.worker, run.claim_id = "staged", None, None
        run.ready_at = self.now + delay
        if end.outcome == "lost":
            run.ready_at = self._seen(run).ready_at
            must(self.now <= run.ready_at <= self.now + LOSS_DELAY, f"{run.id} comes back at {run.ready_at}")
        place = run.ready_at - (run.priority - 500) * HEAD_START
        # Who lost his worker keeps his place.
        run.order_key = min(place, run.order_key) if end.outcome == "lost" else place

    def _following(self, run: Run, end: End) -> tuple[str, timedelta]:
        """Failures and losses count this end already."""
        outcome, nothing = end.outcome, timedelta(0)
        if outcome in ("succeeded", "cancelled"):
            return outcome, nothing
        if run.stop_reason is not None:
            return "cancelled", nothing
        if outcome == "lost":
            return ("dead" if end.poison or run.losses >= LOSS_BUDGET else "staged"), nothing
        retry = self.want.spec_of(run).retry
        return ("dead", nothing) if run.failures >= retry.max_attempts else ("staged", retry.delay.delta)

    def give_back(self, returned: Sequence[tuple[str, str, int]]) -> set[tuple[str, int]]:
        accepted, freed = set(), set[str]()
        for worker, run_id, fence in returned:
            run = self.held(worker, run_id, fence)
            if run is None:
                continue
            accepted.add((run_id, fence))
            if run.stop_reason is not None:
                freed |= self.gates(run)
                self.end_unheld(run, "cancelled", "cancelled")
            else:
                early = run.ready_at > self.now
                run.state, run.attempt = ("staged", run.attempt - 1) if early else ("ready", run.attempt)
                run.worker = run.claim_id = None
        self.release(freed)
        return accepted

    def lapse(self) -> None:
        for worker in self.want.workers.values():
            if worker.state != "gone" and worker.lease_until < self.now:
                worker.state = "gone"
                held = [run.id for run in self.want.runs.values() if run.worker == worker.id and run.losses]
                worker.suspect = held[0] if len(held) == 1 else None

    def orphans(self) -> list[End]:
        """What nobody will report any more."""
        gone = {worker.id: worker for worker in self.want.workers.values() if worker.state == "gone"}
        return [
            End(run.worker, run.id, run.attempt, run.fence, "lost", self._is_poison(run, gone[run.worker]))
            for run in self.want.runs.values()
            if run.worker in gone
        ]

    def _is_poison(self, run: Run, worker: Worker) -> bool:
        """Return whether the run was its worker's only suspect, and its previous attempt was lost, too."""
        rows = [row for (run_id, _), row in self.before.history.items() if run_id == run.id]
        return worker.suspect == run.id and max(rows, key=lambda row: row.attempt).outcome == "lost"

    def reap(self) -> None:
        self.lapse()
        self.report(self.orphans())

    # ── sweep ────────────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self) -> None:
        over = [run for run in self.want.runs.values() if self.is_expired(run) and run.state in UNHELD]
        self.release(self._sweep_away(over, "expired", "expired"))

    def _sweep_away(self, runs: list[Run], state: str, reason: str) -> set[str]:
        """Answers what may have room by it."""
        for run in runs:
            self.end_unheld(run, state, reason)
        return {key for run in runs if run.limited or run.overlap is not None for key in self.gates(run)}

    def misfires(self) -> None:
        alive = [worker for worker in self.before.lives if self._lives(worker)]
        if any(map(self.is_unjudged, self.want.runs.values())) and alive:
            # The worker that has been there longest vouches for the lane from now on.
            self.before.voucher = min(
                alive, key=lambda worker: (self.before.lives[worker][0], worker != self.got.voucher)
            )
        late = [run for run in self.want.runs.values() if self.is_unjudged(run)]
        expired, coalesced, kept = [], [], []
        for run in late:
            schedule = self.before.jobs[run.job].spec.schedule
            if run.once or schedule is None or not self.is_misfire(run):
                kept.append(run)
            elif schedule.misfire.policy == "skip" or run.ready_at < self.now - schedule.misfire.window.delta:
                expired.append(run)
            elif schedule.misfire.policy == "latest" and self._is_superseded(run):
                coalesced.append(run)
            else:
                kept.append(run)
        freed = self._sweep_away(expired, "skipped", "misfire_expired")
        self.release(freed | self._sweep_away(coalesced, "skipped", "coalesced"))
        for run in kept:
            run.state = "ready"

    def _is_superseded(self, run: Run) -> bool:
        return any(
            later.trigger == "schedule"
            and later.attempt == 0
            and later.state in ("staged", "ready")
            and later.ready_at <= self.now
            and later.scheduled_for > run.scheduled_for
            for later in self.before.runs_of(run.job)
        )

    def release_waiting(self) -> None:
        paused = {job.id for job in self.want.jobs.values() if job.on_hold}
        keys = {r.blocked_key for r in self.want.runs.values() if r.state == "waiting" and r.blocked_key not in paused}
        for run in self.want.runs.values():
            if run.blocked_by == "paused" and run.blocked_key in keys:
                run.state, run.blocked_by, run.blocked_key = "ready", None, None
        self.release(key for key in keys if key is not None)

    def replace_earlier(self) -> None:
        """Replace the runs before the youngest due occurrence: stop those that run, and coalesce those that have not
        begun. Runs that were asked for by hand and have not begun stay: they are never skipped."""
        for job_id, job in self.want.jobs.items():
            due = [r for r in self.want.runs_of(job_id) if r.trigger == "schedule" and self._may_replace(r)]
            youngest = max(due, key=lambda run: run.scheduled_for, default=None)
            if youngest is None or youngest.overlap != "replace" or job.on_hold:
                continue
            earlier = [run for run in self.want.runs_of(job_id) if run.id < youngest.id]
            replaced = [r for r in earlier if r.stop_reason is None and (r.state in HELD or r.trigger == "schedule")]
            keys = {key for run in replaced for key in self.gates(run)}
            for run in replaced:
                if run.state == "running":
                    run.state, run.stop_reason = "stopping", "replaced"
                else:
                    self.end_unheld(run, "skipped", "coalesced")
            self.release(keys)

    def _may_replace(self, run: Run) -> bool:
        if run.attempt or (run.deadline_at is not None and run.deadline_at < self.now):
            return False
        due = run.state == "staged" and self.now - LATE <= run.ready_at <= self.now
        return due or run.state == "ready" or run.blocked_by == "overlap"

    # ── control ──────────────────────────────────────────────────────────────────────────────────────────────────

    def retract(self, job: Job) -> list[datetime]:
        """Un-make the occurrences that no worker holds or held."""
        gone = [
            r for r in self.want.runs_of(job.id) if r.trigger == "schedule" and r.attempt == 0 and r.state in UNHELD
        ]
        for run in gone:
            del self.want.runs[run.id]
        return sorted(run.scheduled_for for run in gone)

    def passed(self, job: Job) -> datetime:
        """Up to when occurrences are due, or were claimed or have ended ahead: no cursor goes back to before it."""
        alive = [run.scheduled_for for run in self.want.runs_of(job.id) if run.trigger == "schedule"]
        ended = [row.scheduled_for for row in self.want.history.values() if row.job == job.id and _is_occurrence(row)]
        return max(self.now, *alive, *ended) if alive or ended else self.now

    def pause(self, job_id: str) -> None:
        job = self.want.jobs[job_id]
        if job.state != "active":
            return
        gone = self.retract(job)
        over = [] if job.spec.once else [at for at in gone if at <= self.passed(job)]
        self.miss(job, "skipped_paused", over)
        job.held_at = min((at for at in (*gone[len(over) :], job.cursor) if at is not None), default=None)
        job.cursor, job.on_hold, job.state = None, True, "paused"
        self.audit("job.pause", f"job:{job_id}")

    def resume(self, job_id: str) -> None:
        job = self.want.jobs[job_id]
        if job.state != "paused":
            return
        job.state, job.on_hold = "active", False
        held, job.held_at = job.held_at, None
        if held is not None:
            job.cursor = held
            if held <= self.now:
                self._resume_late(job, held)
        for run in self.want.runs_of(job_id):
            if run.blocked_by == "paused":
                run.state, run.blocked_by, run.blocked_key = "ready", None, None
        self.audit("job.resume", f"job:{job_id}")

    def _resume_late(self, job: Job, held: datetime) -> None:
        if job.spec.once:
            job.cursor = None
            self.make_run(job, "schedule", held)
            return
        assert job.step is not None
        missed = owed(held, job.step, self.now)
        self.miss(job, "skipped_paused", missed)
        job.cursor = missed[-1] + job.step

    def _still_owed(self, job: Job) -> None:
        """What a cursor that is taken away was not asked for yet."""
        for at, reason in ((job.cursor, "cancelled"), (job.held_at, "skipped_paused")):
            if at is not None:
                self.miss(job, reason, owed(at, job.step, self.now))

    def cancel(self, job_id: str, reason: str, stop_running: bool) -> None:
        job = self.want.jobs[job_id]
        if not job.open:
            return
        self._still_owed(job)
        job.cursor = job.held_at = None
        job.state, job.on_hold, job.ended_at = "cancelled", False, self.now
        for run in self.want.runs_of(job_id):
            self._cancel(run, reason, stop_running)
        self.audit("job.cancel", f"job:{job_id}")

    def _cancel(self, run: Run, reason: str, stop_running: bool) -> None:
        if run.state in UNHELD:
            self.end_unheld(run, "cancelled", "cancelled")
        elif run.state == "running":
            run.stop_reason = reason
            run.state = "stopping" if stop_running else "running"

    def cancel_run(self, run_id: str, reason: str) -> None:
        run = self.want.runs.get(run_id)
        if run is None or run.state == "stopping":
            return
        frees = run.state in UNHELD and (run.limited or run.overlap is not None)
        self._cancel(run, reason, True)
        if frees:
            self.release(self.gates(run))
        self.audit("run.cancel", f"run:{run_id}")

    # ── edit ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def edit(self, job_id: str, spec: JobSpec) -> None:
        job = self.want.jobs[job_id]
        old, text = job.spec, encode(spec).decode()
        if encode(old).decode() == text:
            return
        was, moves = replace(job), _instants(old) != _instants(spec)
        gone = self.retract(job)
        after = self.passed(job)
        if moves:
            self.miss(was, "cancelled", [at for at in gone if at <= self.now])
            self._still_owed(was)
        job.version, job.text = job.version + 1, text
        self.want.specs[job_id, job.version] = text
        if limits_of(old) != limits_of(spec):
            known = self.want.limits.get(job_id)
            self.want.limits[job_id] = Limit(spec.max_concurrency or NO_BOUND, known and known.tat)
            self.release([job_id])
        if not moves:
            for at in gone:
                self.make_run(job, "schedule", at)
        else:
            self._move(job, after)
        self.audit("job.edit", f"job:{job_id}")

    def _move(self, job: Job, after: datetime) -> None:
        assert job.step is not None
        job.anchor = self.now
        first = self.now + job.step
        while first <= after:
            first += job.step
        job.cursor, job.held_at = (None, first) if job.state == "paused" else (first, None)

    # ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────

    def retry(self, row: Ended) -> None:
        self.make_run(self.want.jobs[row.job], "retry", None, row.priority, row.run, row.args)
        self.audit("run.retry", f"run:{row.run}")

    def redrive(self, letters: Sequence[Ended]) -> None:
        for row in letters:
            self.want.dead.remove(row.run)
            self.make_run(self.want.jobs[row.job], "redrive", None, row.priority, row.run, row.args)
        self.audit("dead.redrive", "dead-letters")

    def discard(self, run_ids: Sequence[str]) -> None:
        self.want.dead -= set(run_ids)
        self.audit("dead.discard", "dead-letters")


def _is_occurrence(row: Ended) -> bool:
    return row.trigger == "schedule" and row.final and row.first_for is None


def _instants(spec: JobSpec) -> Any:
    """What says which instants a job of the simulation owes."""
    return spec.schedule and (spec.schedule.every, spec.schedule.at)
