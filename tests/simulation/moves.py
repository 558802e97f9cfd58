"""The moves that can be made in a world: what people ask, what workers say, what nodes do by themselves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import msgspec

from tests.simulation.book import Book, Job, Run
from tests.simulation.pieces import End, must
from tests.simulation.reference import Reference
from tests.simulation.world import HORIZON, LEASE, Claimed, Move, World, chosen
from tocsin.clock import iso
from tocsin.errors import ApiProblem
from tocsin.flow import catalog, claim, control, dead, edit, fleet, plan, reap, report, submit, sweep
from tocsin.flow.claim import THE_BEGINNING, Share
from tocsin.flow.report import Ending, Returned
from tocsin.flow.shared.idempotency import Replay, Wish
from tocsin.flow.shared.transitions import Key
from tocsin.model.job import (
    ConcurrencyKey,
    JobSpec,
    Misfire,
    RateLimit,
    Retry,
    RunRequest,
    Schedule,
)
from tocsin.model.scalars import Duration, Instant
from tocsin.model.targets import ProcessTarget
from tocsin.wire import Finished, Register, RunError, encode

T = TypeVar("T")
LEAD = timedelta(seconds=1)


class Choices:
    """Decisions that were drawn before anybody knew what they decide: so what is drawn never depends on the world."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)

    def number(self, below: int) -> int:
        """0 if there are no more numbers."""
        return next(self._numbers, 0) % below

    def of(self, *options: T) -> T:
        return options[self.number(len(options))]

    def seconds(self, *options: float) -> timedelta:
        return timedelta(seconds=self.of(*options))


Maker = Callable[[World, Choices], "Move | None"]


def _one_of(world: World, choose: Choices, jobs: Sequence[Job]) -> Job | None:
    return chosen(jobs, choose.number(8)) if jobs else None


def _open_jobs(world: World) -> list[Job]:
    return [job for job in world.book.jobs.values() if job.open]


def _wish(world: World) -> Wish:
    return Wish(world.who.tenant_id, str(uuid.UUID(int=world.rng.getrandbits(128))), b"the same")


def short(id_: str) -> str:
    """Enough of an id to tell it from its neighbours."""
    return f"{id_[:8]}…{id_[-4:]}"


# ── submit ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _schedule(world: World, choose: Choices) -> Schedule | None:
    kind = choose.of("every", "every", "every", "at", "now", "manual")
    if kind == "now":
        return None
    if kind == "manual":
        return Schedule(manual=True)
    misfire = Misfire(
        policy=choose.of("latest", "all", "skip"),
        window=Duration(choose.seconds(3600, 90)),
        max=choose.of(2, 8),
    )
    if kind == "at":
        return Schedule(at=Instant(world.now + choose.seconds(4, -30, 60)), misfire=misfire)
    return Schedule(every=Duration(choose.seconds(5, 2, 20, 61)), misfire=misfire)


def _key(choose: Choices) -> ConcurrencyKey | None:
    """Few, so that jobs share them."""
    key = choose.of(None, None, "shared", "customer-{args.customer}", "customer-a")
    return None if key is None else ConcurrencyKey(key=key, max=choose.of(1, 2))


def new_job(world: World, choose: Choices) -> Move | None:
    if len(_open_jobs(world)) >= 5:
        return None
    spec = JobSpec(
        target=ProcessTarget(command=["true"]),
        schedule=_schedule(world, choose),
        overlap=choose.of("skip", "queue", "queue_all", "allow", "replace"),
        max_concurrency=choose.of(None, None, 1, 2),
        concurrency_key=_key(choose),
        rate_limit=choose.of(None, None, None, RateLimit(rate="1/s", burst=2), "30/min"),
        start_deadline=choose.of(None, None, Duration(timedelta(seconds=3))),
        priority=choose.of(500, 600),
        retry=Retry(
            max_attempts=choose.of(2, 1, 3),
            backoff="fixed",
            delay=Duration(choose.seconds(1, 5, 0)),
            jitter="none",
        ),
    )
    return submit_job(world, spec)


def submit_job(world: World, spec: JobSpec) -> Move:
    async def act(node: Any) -> Any:
        request = submit.job_request(world.who, spec, None, world.now)
        [answer], _ = await submit.submit_jobs(node.db, node.lanes, [request], HORIZON)
        return answer

    def expect(reference: Reference, _: Any) -> None:
        [job_id] = reference.got.jobs.keys() - reference.before.jobs.keys()
        reference.submit_job(job_id, spec)

    told = "manual" if spec.schedule and spec.schedule.manual else ""
    if spec.schedule is not None and not told:
        told = f"every {spec.schedule.every}" if spec.schedule.every else f"at {spec.schedule.at}"
    name = (
        f"a new job ({told or 'now'}, {spec.overlap}, at most {spec.max_concurrency}, key {spec.concurrency_key}, "
        f"rate {spec.rate_limit}, deadline {spec.start_deadline}, {spec.retry.max_attempts} tries)"
    )
    return Move(name, act, expect)


def ask(world: World, choose: Choices) -> Move | None:
    job = _one_of(world, choose, list(world.book.jobs.values()))
    if job is None or len(world.book.runs) > 30:
        return None
    at = choose.of(None, None, world.now + timedelta(seconds=6))
    asked = [(at, 500 + n) for n in range(choose.of(1, 2, 3))]
    given: Any = choose.of({"customer": "a"}, {"customer": "b"}, msgspec.UNSET)
    runs = [RunRequest(at=None if at is None else Instant(at), priority=rank, args=given) for _, rank in asked]
    args = None if given is msgspec.UNSET else encode(given).decode()
    wish = _wish(world)

    async def act(node: Any) -> Any:
        request = submit.RunsRequest(world.who, job.id, runs, "api", wish)
        [answer], _ = await submit.submit_runs(node.db, [request])
        if isinstance(answer, (ApiProblem, Replay)):
            raise answer
        return answer

    return Move(
        f"{len(runs)} runs of {short(job.id)} at {at or 'once'}",
        act,
        lambda reference, _: reference.submit_runs(job.id, asked, args),
        key=wish.key,
        refuses=lambda book: not book.jobs[job.id].open,
    )


# ── what nodes do by themselves ──────────────────────────────────────────────────────────────────────────────────


def plan_(world: World, choose: Choices) -> Move:
    return Move("plan", lambda node: plan.plan(node.db, HORIZON), lambda reference, _: reference.plan())


def promote(world: World, choose: Choices) -> Move:
    places = [(world.lane_id, world.who.tenant_id)]
    return Move("promote", lambda node: claim.promote(node.db, places, 1000), lambda reference, _: reference.promote())


def _reap(world: World) -> Callable[[Any], Any]:
    async def act(node: Any) -> Any:
        await reap.lapse(node.db)
        lost = [Ending(o.worker_id, o.finished) for o in await reap.orphans(node.db)]
        return await report.report(node.db, node.specs, lost, world.rng) if lost else None

    return act


def reap_(world: World, choose: Choices) -> Move:
    return Move("reap", _reap(world), lambda reference, _: reference.reap(), whole=False)


def expire(world: World, choose: Choices) -> Move:
    return Move("expire", lambda node: sweep.expire(node.db), lambda reference, _: reference.expire())


def misfires(world: World, choose: Choices) -> Move:
    return Move(
        "misfires", lambda node: sweep.misfires(node.db, [world.lane_id]), lambda reference, _: reference.misfires()
    )


def release(world: World, choose: Choices) -> Move:
    return Move(
        "release",
        lambda node: sweep.release_waiting(node.db, [world.lane_id]),
        lambda reference, _: reference.release_waiting(),
        whole=False,
    )


def replace_(world: World, choose: Choices) -> Move:
    jobs = [Key(world.who.tenant_id, job_id) for job_id in world.book.jobs]
    return Move(
        "replace",
        lambda node: sweep.replace_earlier(node.db, jobs),
        lambda reference, _: reference.replace_earlier(),
        whole=False,
    )


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────


def register(world: World, choose: Choices) -> Move | None:
    if sum(worker.state != "gone" for worker in world.book.workers.values()) >= 4:
        return None
    body = Register(name="sim", slots=10, targets=["process"])

    def expect(reference: Reference, _: Any) -> None:
        [new] = reference.got.workers.keys() - reference.before.workers.keys()
        worker = reference.got.workers[new]
        must(worker.state == "live", "a new worker lives")
        must(worker.lease_until == reference.now + timedelta(seconds=LEASE), f"lease until {worker.lease_until}")
        reference.want.workers[new] = worker

    return Move("a worker", lambda node: fleet.register(node.db, world.who, body, LEASE), expect)


def _workers(world: World, choose: Choices, most: int = 2) -> list[str]:
    known = sorted(world.book.workers)
    return [chosen(known, choose.number(8)) for _ in range(1 + choose.number(most))] if known else []


def renew(world: World, choose: Choices) -> Move | None:
    workers = sorted(set(_workers(world, choose, 4)))
    if not workers:
        return None

    def expect(reference: Reference, result: Any) -> None:
        for worker_id in workers:
            worker = reference.want.workers[worker_id]
            if worker.state != "gone":
                worker.lease_until = reference.now + timedelta(seconds=LEASE)

    return Move(f"{len(workers)} heartbeats", lambda node: fleet.renew(node.db, workers, LEASE), expect)


def leave(world: World, choose: Choices) -> Move | None:
    if not world.book.workers:
        return None
    [worker_id] = _workers(world, choose, 1)

    def expect(reference: Reference, _: Any) -> None:
        if not any(run.worker == worker_id for run in reference.before.runs.values()):
            reference.want.workers[worker_id].state = "gone"

    return Move(f"{short(worker_id)} leaves", lambda node: fleet.leave(node.db, worker_id), expect)


def _learn(world: World, arrives: bool, slots: Sequence[str]) -> Callable[[Any], None]:
    def learn(taken: Any) -> None:
        for row in taken.rows if arrives else ():
            worker = slots[row["slot"] - 1]
            world.claims.append(
                Claimed(worker, row["id"], row["attempt"], row["fence"], row["claim_id"], row["special"])
            )

    return learn


def claim_(world: World, choose: Choices) -> Move | None:
    workers = _workers(world, choose)
    if not workers:
        return None
    slots = [worker for worker in workers for _ in range(choose.of(3, 1, 10))]
    most = choose.of(1000, 1000, 2)
    shares = [Share(world.lane_id, world.who.tenant_id, most, THE_BEGINNING)]
    arrives = choose.of(True, True, True, False)
    return Move(
        f"claim for {', '.join(map(short, workers))}, {len(slots)} slots, share {most}" + ("" if arrives else ", lost"),
        lambda node: claim.take(node.db, shares, slots),
        lambda reference, _: reference.claim(slots, most),
        whole=False,
        learn=_learn(world, arrives, slots),
    )


def claim_ahead(world: World, choose: Choices) -> Move | None:
    workers = _workers(world, choose)
    if not workers:
        return None
    slots = [worker for worker in workers for _ in range(choose.of(3, 1))]
    shares = [Share(world.lane_id, world.who.tenant_id, len(slots), THE_BEGINNING)]
    lead = choose.seconds(1, 6)
    return Move(
        f"claim ahead for {', '.join(map(short, workers))}, {len(slots)} slots, {lead}",
        lambda node: claim.take_ahead(node.db, shares, slots, lead),
        lambda reference, _: reference.claim_ahead(slots, lead),
        learn=_learn(world, True, slots),
    )


def _some_claims(world: World, choose: Choices) -> list[Claimed]:
    if not world.claims:
        return []
    picked = [chosen(world.claims, choose.number(13)) for _ in range(choose.of(1, 2, 3))]
    return list(dict.fromkeys(picked))


def report_(world: World, choose: Choices) -> Move | None:
    """Of claims that were ever handed out: of now, of before, told twice, by zombies."""
    told = []
    for held in _some_claims(world, choose):
        outcome = choose.of("succeeded", "failed", "succeeded", "timeout", "cancelled")
        told.append((held, outcome))
    if not told:
        return None
    ends = [End(held.worker, held.run, held.attempt, held.fence, outcome) for held, outcome in told]
    endings = [
        Ending(
            end.worker,
            Finished(
                run_id=end.run,
                attempt=end.attempt,
                fence=end.fence,
                outcome=end.outcome,  # type: ignore[arg-type]
                error=RunError(class_="Sim", message="it broke") if end.outcome == "failed" else None,
            ),
            plain=end.outcome == "succeeded" and not held.special,
        )
        for end, (held, _) in zip(ends, told, strict=True)
    ]

    def expect(reference: Reference, result: Any) -> None:
        accepted = reference.report(ends)
        must(result is None or result.accepted == accepted, f"accepted {result and result.accepted}, not {accepted}")

    name = ", ".join(f"{short(e.worker)} reports {short(e.run)}/{e.attempt} {e.outcome}" for e in ends)
    return Move(name, lambda node: report.report(node.db, node.specs, endings, world.rng), expect)


def give_back(world: World, choose: Choices) -> Move | None:
    back = [(held.worker, held.run, held.fence) for held in _some_claims(world, choose)]
    if not back:
        return None

    def expect(reference: Reference, result: Any) -> None:
        accepted = reference.give_back(back)
        must(result is None or result.accepted == accepted, f"accepted {result and result.accepted}, not {accepted}")

    name = ", ".join(f"{short(worker)} hands back {short(run)}" for worker, run, _ in back)
    return Move(name, lambda node: report.give_back(node.db, [Returned(*b) for b in back]), expect)


def ask_again(world: World, choose: Choices) -> Move | None:
    """A worker asks without knowing the last answer: what was lost on the way is taken back."""
    if not world.book.workers:
        return None
    [worker_id] = _workers(world, choose, 1)
    last = max((held.claim_id for held in world.claims if held.worker == worker_id), default=0)

    async def act(node: Any) -> Any:
        lost = await report.claims_after(node.db, worker_id, last)
        return await report.give_back(node.db, lost) if lost else None

    def expect(reference: Reference, _: Any) -> None:
        held = [r for r in reference.before.runs.values() if r.worker == worker_id and (r.claim_id or 0) > last]
        reference.give_back([(worker_id, run.id, run.fence) for run in held])

    return Move(f"{short(worker_id)} asks again", act, expect)


# ── control ──────────────────────────────────────────────────────────────────────────────────────────────────────


def pause(world: World, choose: Choices) -> Move | None:
    job = _one_of(world, choose, list(world.book.jobs.values()))
    return job and _switch(world, job, "pause")


def resume(world: World, choose: Choices) -> Move | None:
    paused = [job for job in world.book.jobs.values() if job.state == "paused"]
    job = _one_of(world, choose, paused or list(world.book.jobs.values()))
    return job and _switch(world, job, "resume")


def _switch(world: World, job: Job, verb: Literal["pause", "resume"]) -> Move:
    wish = _wish(world)
    return Move(
        f"{verb} {short(job.id)}",
        lambda node: getattr(control, verb)(node.db, world.who, job.id, "", wish),
        lambda reference, _: getattr(reference, verb)(job.id),
        key=wish.key,
        refuses=lambda book: not book.jobs[job.id].open,
    )


def cancel(world: World, choose: Choices) -> Move | None:
    job = _one_of(world, choose, list(world.book.jobs.values()))
    if job is None:
        return None
    wish, stop = _wish(world), choose.of(True, False)
    return Move(
        f"cancel {short(job.id)}",
        lambda node: control.cancel(node.db, world.who, job.id, "enough", stop, wish, "job.cancel"),
        lambda reference, _: reference.cancel(job.id, "enough", stop),
        key=wish.key,
    )


def cancel_run(world: World, choose: Choices) -> Move | None:
    known = sorted({*world.book.runs, *(row.run for row in world.book.history.values())})
    if not known:
        return None
    run_id, wish = chosen(known, choose.number(8)), _wish(world)
    return Move(
        f"cancel run {short(run_id)}",
        lambda node: control.cancel_run(node.db, world.who, run_id, "enough", wish),
        lambda reference, _: reference.cancel_run(run_id, "enough"),
        key=wish.key,
        refuses=lambda book: run_id not in book.runs and not book.has_ended(run_id),  # it was retracted
    )


def edit_(world: World, choose: Choices) -> Move | None:
    job = _one_of(
        world, choose, [j for j in world.book.jobs.values() if j.step is not None or j.id in world.book.limits]
    )
    if job is None:
        return None
    change: dict[str, Any] = choose.of(
        {"priority": 700},
        {"max_concurrency": 1},
        {"every": 7},
        {"max_concurrency": 3},
        {"max_concurrency": None},
        {"overlap": "queue"},
        {"overlap": "allow"},
        {"every": 3},
        {"concurrency_key": None},
        {"concurrency_key": ConcurrencyKey(key="shared", max=3)},
        {"rate_limit": None},
        {"rate_limit": "2/s"},
        {"overlap": "replace"},
    )
    wish, told = _wish(world), dict(change)
    every = change.get("every")
    if every is not None and job.step is None:
        return None

    def changed(old: JobSpec) -> JobSpec:
        if every is None:
            return msgspec.structs.replace(old, **told)
        assert old.schedule is not None
        schedule = msgspec.structs.replace(old.schedule, every=Duration(timedelta(seconds=every)))
        return msgspec.structs.replace(old, schedule=schedule)

    spec = changed(job.spec)
    return Move(
        f"edit {short(job.id)}: {change}",
        lambda node: edit.edit(
            node.db, node.lanes, world.who, job.id, lambda _: spec, wish, None, HORIZON, node.contents
        ),
        lambda reference, _: reference.edit(job.id, spec),
        key=wish.key,
        refuses=lambda book: not book.jobs[job.id].open,
    )


# ── dead letters ─────────────────────────────────────────────────────────────────────────────────────────────────


def _is_cancelled(book: Book, job_id: str) -> bool:
    return book.jobs[job_id].state == "cancelled"


def retry(world: World, choose: Choices) -> Move | None:
    ended = [row for row in world.book.history.values() if row.final and row.first_for is None]
    if not ended or len(world.book.runs) > 30:
        return None
    row, wish = chosen(ended, choose.number(8)), _wish(world)
    return Move(
        f"retry {short(row.run)}",
        lambda node: dead.retry(node.db, world.who, row.run, world.now, wish),
        lambda reference, _: reference.retry(row),
        key=wish.key,
        refuses=lambda book: _is_cancelled(book, row.job),
    )


def redrive(world: World, choose: Choices) -> Move | None:
    letters = [row for row in world.book.history.values() if row.final and row.run in world.book.dead]
    if not letters:
        return None
    picked, wish = letters[-1 - choose.number(3) :], _wish(world)
    which = dead.Chosen(ids=[row.run for row in picked])
    return Move(
        f"redrive {len(picked)}",
        lambda node: dead.redrive(node.db, world.who, which, world.now, None, wish),
        lambda reference, _: reference.redrive(picked),
        key=wish.key,
        refuses=lambda book: any(row.run not in book.dead or _is_cancelled(book, row.job) for row in picked),
    )


def discard(world: World, choose: Choices) -> Move | None:
    if not world.book.dead:
        return None
    run_id, wish = chosen(sorted(world.book.dead), choose.number(8)), _wish(world)
    return Move(
        f"discard {short(run_id)}",
        lambda node: dead.discard(node.db, world.who, dead.Chosen(ids=[run_id]), wish),
        lambda reference, _: reference.discard([run_id]),
        key=wish.key,
        refuses=lambda book: run_id not in book.dead,
    )


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def look(world: World, choose: Choices) -> Move | None:
    """`next_run_at` is the earliest occurrence that has not begun, staged or still to be planned."""
    ids = sorted(world.book.jobs)
    if not ids:
        return None

    def expect(reference: Reference, result: Any) -> None:
        for document in result or ():
            job = reference.before.jobs[document["id"]]
            staged = [
                run.ready_at
                for run in reference.before.runs_of(job.id)
                if run.trigger == "schedule" and run.attempt == 0 and run.worker is None
            ]
            due = min((at for at in (job.cursor, *staged) if at is not None), default=None)
            must(document["next_run_at"] == (due and iso(due)), f"{job.id}: {document['next_run_at']}, not {due}")
            must(document["state"] == job.state, f"{job.id} is {job.state}")

    return Move("look", lambda node: catalog.get_jobs(node.db, world.who, ids, lambda pool, due: due), expect)


COMMON: tuple[Maker, ...] = (
    plan_,
    claim_,
    report_,
    renew,
    plan_,
    claim_,
    report_,
    claim_ahead,
    release,
    expire,
    reap_,
    replace_,
)
RARE: tuple[Maker, ...] = (
    *(new_job, ask, register, give_back, ask_again, misfires, promote, pause, resume, cancel_run, edit_),
    *(retry, redrive, discard, leave, cancel, look, pause, resume, edit_),
)
MAKERS: dict[str, Maker] = {maker.__name__.strip("_"): maker for maker in (*COMMON, *RARE)}


# ── coming to rest ───────────────────────────────────────────────────────────────────────────────────────────────

GOOD = "ffffffff-ffff-7fff-bfff-ffffffffffff"


def every_slot(world: World) -> Move:
    """A worker that never dies takes all there is."""
    slots, shares = [GOOD] * 100, [Share(world.lane_id, world.who.tenant_id, 1000, THE_BEGINNING)]

    async def act(node: Any) -> Any:
        await world.observer.execute(
            "insert into workers (id, key_id, name, pool, slots, lease_until)"
            " values ($1, $1, 'good', 'default', 100, now() + interval '1 day') on conflict do nothing",
            GOOD,
        )
        return await claim.take(node.db, shares, slots)

    def expect(reference: Reference, _: Any) -> None:
        reference.want.workers.setdefault(GOOD, reference.got.workers[GOOD])
        reference.claim(slots, 1000)

    return Move("claim all", act, expect, whole=False)


def succeed(world: World, runs: Sequence[Run]) -> Move:
    ends = [End(GOOD, run.id, run.attempt, run.fence, "succeeded") for run in runs]
    endings = [
        Ending(GOOD, Finished(run_id=e.run, attempt=e.attempt, fence=e.fence, outcome="succeeded")) for e in ends
    ]
    return Move(
        "all succeed",
        lambda node: report.report(node.db, node.specs, endings, world.rng),
        lambda reference, _: must(reference.report(ends) == {(e.run, e.fence) for e in ends}, "all are accepted"),
    )
