"""submit: store jobs and the runs asked for by hand, many calls in one commit, then acknowledge.

A job that is due within the horizon gets its run at once; any other gets a cursor that the planner follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tocsin.errors import ApiProblem, Conflict, InvalidInput, NotFound
from tocsin.flow.shared import audit
from tocsin.flow.shared.documents import NEW_RUN, run_document
from tocsin.flow.shared.idempotency import Replay, Wish
from tocsin.flow.shared.lanes import LaneBook, LaneKey, lane_key
from tocsin.flow.shared.transitions import Hint, NewRun, hints, stage
from tocsin.model.access import Identity
from tocsin.model.ids import new_id, new_ids
from tocsin.model.job import JobSpec, RunRequest, check
from tocsin.model.schedule import check_schedule, first_fire
from tocsin.model.strict import refuse_nul
from tocsin.store.db import Connection, Database, Row, Sql, columns
from tocsin.telemetry import SUBMITTED
from tocsin.wire import encode

SQL = Sql(__file__)


class JobRequest(NamedTuple):
    """One job that somebody wants stored."""

    who: Identity
    spec: JobSpec
    spec_json: str
    wish: Wish | None


class RunsRequest(NamedTuple):
    """Runs of one job that somebody wants; one audit row and one idempotency record for all of them."""

    who: Identity
    job_id: str
    runs: Sequence[RunRequest]
    trigger: str
    wish: Wish | None
    status: int = 202


class Stored(NamedTuple):
    """The ids that were made, when; and the document of a run that was asked for alone."""

    ids: list[str]
    at: datetime
    run: dict[str, Any] | None = None


Answer = Stored | Replay | ApiProblem


def job_request(who: Identity, spec: JobSpec, wish: Wish | None, now: datetime) -> JobRequest:
    """Check a spec against the present and freeze it; raises what is wrong with it."""
    check(spec)
    if spec.schedule is not None:
        check_schedule(spec.schedule, now)
    text = encode(spec)
    refuse_nul(text)
    return JobRequest(who, spec, text.decode(), wish)


async def submit_jobs(
    db: Database, lanes: LaneBook, requests: Sequence[JobRequest], horizon: timedelta
) -> tuple[list[Answer], list[Hint]]:
    """Store every job that can be stored, in one transaction; answers in the order of the requests."""
    lane_of = await lanes.intern(lane_key(r.spec) for r in requests)
    now = db.clock.now()
    ids = new_ids(now, len(requests))
    answers: dict[int, Answer] = {
        i: InvalidInput.field("pool", "unknown_pool", f"there is no pool {r.spec.pool!r}")
        for i, r in enumerate(requests)
        if lane_key(r.spec) not in lane_of
    }
    async with db.transaction("submit") as connection:
        open_ = [i for i in range(len(requests)) if i not in answers]
        answers |= await _replays(connection, {i: (requests[i].wish, 201, [ids[i]]) for i in open_})
        open_ = [i for i in open_ if i not in answers]
        stored = await _store_jobs(connection, [(ids[i], requests[i]) for i in open_], lane_of, now)
        refused = {i: _name_taken(requests[i].spec) for i in open_ if ids[i] not in stored}
        answers |= _followers(answers, {ids[i]: problem for i, problem in refused.items()}) | refused
        await _drop_keys(connection, [requests[i].wish for i in refused])
        kept = [(ids[i], requests[i]) for i in open_ if ids[i] in stored]
        staged = await _give_first_fires(connection, kept, now, horizon)
        await audit.record_all(connection, [audit.entry(r.who, "job.create", f"job:{id_}") for id_, r in kept])
    SUBMITTED.inc(len(kept))
    answers |= {i: Stored([ids[i]], now) for i in open_ if ids[i] in stored}
    return [answers[i] for i in range(len(requests))], staged


async def submit_runs(db: Database, requests: Sequence[RunsRequest]) -> tuple[list[Answer], list[Hint]]:
    """Make runs of existing jobs, many calls in one transaction; answers in the order of the requests."""
    now = db.clock.now()
    ids = [new_ids(now, len(r.runs)) for r in requests]
    answers: dict[int, Answer] = {}
    async with db.transaction("submit") as connection:
        answers |= await _replays(connection, {i: (r.wish, r.status, ids[i]) for i, r in enumerate(requests)})
        open_ = [i for i in range(len(requests)) if i not in answers]
        jobs = await _held_jobs(connection, [(requests[i].who.tenant_id, requests[i].job_id) for i in open_])
        found = {i: _no_more_runs(jobs.get((requests[i].who.tenant_id, requests[i].job_id))) for i in open_}
        refused = {i: problem for i, problem in found.items() if problem is not None}
        answers |= _followers(answers, {ids[i][0]: problem for i, problem in refused.items()}) | refused
        await _drop_keys(connection, [requests[i].wish for i in refused])
        open_ = [i for i in open_ if i not in answers]
        rows = await stage(connection, [run for i in open_ for run in _new_runs(requests[i], ids[i])])
        await audit.record_all(
            connection,
            [
                audit.entry(r.who, "run.create", f"job:{r.job_id}", runs=len(r.runs))
                for r in map(requests.__getitem__, open_)
            ],
        )
    made = {row["id"]: row for row in rows}
    for i in open_:
        request = requests[i]
        job = jobs[request.who.tenant_id, request.job_id]
        alone = _document(request, job, made[ids[i][0]]) if len(ids[i]) == 1 else None
        answers[i] = Stored(ids[i], now, alone)
    return [answers[i] for i in range(len(requests))], hints(rows)


def _document(request: RunsRequest, job: Row, made: Row) -> dict[str, Any]:
    """The run as it was when it was stored: nothing that a read would know better."""
    [run] = request.runs
    return run_document(
        NEW_RUN
        | {
            "id": made["id"],
            "job_id": request.job_id,
            "job_name": job["name"],
            "job_version": job["version"],
            "state": made["state"],
            "max_attempts": job["max_attempts"],
            "priority": job["priority"] if run.priority is None else run.priority,
            "scheduled_for": made["ready_at"] if run.at is None else run.at.at,
            "ready_at": made["ready_at"],
            "args": encode(run.args).decode() if isinstance(run.args, dict) else None,
            "tags": job["tags"],
            "trigger": request.trigger,
        }
    )


def _new_runs(request: RunsRequest, ids: list[str]) -> list[NewRun]:
    return [
        NewRun(
            request.who.tenant_id,
            id_,
            request.job_id,
            request.trigger,
            run.at.at if run.at is not None else None,
            run.priority,
            encode(run.args).decode() if isinstance(run.args, dict) else None,
        )
        for id_, run in zip(ids, request.runs, strict=True)
    ]


def _no_more_runs(job: Row | None) -> ApiProblem | None:
    if job is None:
        return NotFound("there is no such job")
    state = job["state"]
    if state in ("cancelled", "completed"):
        return Conflict(f"the job is {state} and takes no more runs", code=f"job_{state}")
    return None


async def _held_jobs(connection: Connection, keys: list[tuple[int, str]]) -> dict[tuple[int, str], Row]:
    rows = await connection.fetch(SQL["open_jobs"], *columns(sorted(set(keys)), 2))
    return {(row["tenant_id"], row["id"]): row for row in rows}


async def _replays(connection: Connection, wishes: dict[int, tuple[Wish | None, int, list[str]]]) -> dict[int, Answer]:
    """Claim each idempotency key for its call; those taken already answer what the first call did."""
    wanted = [(i, wish, status, ids) for i, (wish, status, ids) in wishes.items() if wish is not None]
    if not wanted:
        return {}
    # In the order of the keys, as every node takes them: two commits that share keys wait, and never in a circle.
    batch = sorted((*wish, status, f"{{{','.join(ids)}}}") for _, wish, status, ids in wanted)
    new = {row["first_id"] for row in await connection.fetch(SQL["new_keys"], *columns(batch, 5))}
    taken = [(i, wish) for i, wish, _, ids in wanted if ids[0] not in new]
    if not taken:
        return {}
    rows = await connection.fetch(SQL["known_keys"], *columns([(w.tenant_id, w.key) for _, w in taken], 2))
    known = {(row["tenant_id"], row["key"]): row for row in rows}
    out: dict[int, Answer] = {}
    for i, wish in taken:
        row = known[wish.tenant_id, wish.key]
        out[i] = (
            Replay(row["status"], row["ids"], row["version"])
            if row["digest"] == wish.digest
            else InvalidInput("this Idempotency-Key was used for another call", code="idempotency_mismatch")
        )
    return out


def _followers(answers: dict[int, Answer], refused: dict[str, ApiProblem]) -> dict[int, Answer]:
    """A repeat that shares its first call's commit shares its refusal, too: there is no reply to replay."""
    replays = {i: a for i, a in answers.items() if isinstance(a, Replay)}
    return {i: refused[a.ids[0]] for i, a in replays.items() if a.ids[0] in refused}


async def _drop_keys(connection: Connection, wishes: list[Wish | None]) -> None:
    """A refused call is not remembered."""
    given = [(w.tenant_id, w.key) for w in wishes if w is not None]
    if given:
        await connection.execute(SQL["drop_keys"], *columns(given, 2))


async def _store_jobs(
    connection: Connection, jobs: list[tuple[str, JobRequest]], lane_of: dict[LaneKey, int], now: datetime
) -> set[str]:
    rows = [
        (
            r.who.tenant_id,
            id_,
            r.spec.name,
            r.spec_json,
            lane_of[lane_key(r.spec)],
            r.spec.once,
            None if r.spec.once or r.spec.overlap == "allow" else r.spec.overlap,
            r.spec.max_concurrency,
            r.spec.retry.max_attempts,
            r.spec.priority,
            r.spec.start_deadline.delta if r.spec.start_deadline else None,
            encode(r.spec.tags).decode() if r.spec.tags else None,
            now,  # the very instant the first fire is counted from: `every` is anchored at it
        )
        # In the order of the names, as every node takes them: two commits that share names never wait in a circle.
        for id_, r in sorted(jobs, key=lambda j: (j[1].who.tenant_id, j[1].spec.name or ""))
    ]
    if not rows:
        return set()
    stored = {row["id"] for row in await connection.fetch(SQL["jobs"], *columns(rows, 13))}
    limits = [(row[0], row[1], row[7]) for row in rows if row[7] is not None and row[1] in stored]
    if limits:
        await connection.execute(SQL["limits"], *columns(limits, 3))
    return stored


async def _give_first_fires(
    connection: Connection, jobs: list[tuple[str, JobRequest]], now: datetime, horizon: timedelta
) -> list[Hint]:
    runs, cursors = [], []
    for id_, request in jobs:
        first = first_fire(request.spec.schedule, now)
        if request.spec.once and first is not None and first <= now + horizon:
            nominal = _nominal(request.spec, first)
            runs.append(NewRun(request.who.tenant_id, new_id(max(first, now)), id_, "schedule", nominal))
        elif first is not None:
            cursors.append((request.who.tenant_id, id_, first))
    if cursors:
        await connection.execute(SQL["triggers"], *columns(cursors, 3))
    return hints(await stage(connection, runs))


def _name_taken(spec: JobSpec) -> Conflict:
    return Conflict(f"a job named {spec.name!r} exists already", code="name_taken")


def _nominal(spec: JobSpec, first: datetime) -> datetime | None:
    """An `at` a little in the past runs now, but stands for the instant that was asked for. None: now."""
    if spec.schedule is None:
        return None
    return spec.schedule.at.at if spec.schedule.at is not None else first


# ── batches of jobs ──────────────────────────────────────────────────────────────────────────────────────────────


async def submit_batch(
    db: Database, lanes: LaneBook, requests: Sequence[JobRequest], wish: Wish | None, horizon: timedelta
) -> tuple[Stored | Replay, list[Hint]]:
    """Store all of one caller's jobs or none, in one transaction; raises why none. One audit row, one key."""
    who = requests[0].who
    lane_of = await lanes.intern({lane_key(r.spec) for r in requests})
    for i, request in enumerate(requests):
        if lane_key(request.spec) not in lane_of:
            raise InvalidInput.field(f"jobs[{i}].pool", "unknown_pool", f"there is no pool {request.spec.pool!r}")
    _refuse_twins(requests)
    now = db.clock.now()
    ids = new_ids(now, len(requests))
    jobs = list(zip(ids, requests, strict=True))
    async with db.transaction("submit") as connection:
        known = await _replays(connection, {0: (wish, 201, ids)})
        if isinstance(answer := known.get(0), Replay):
            return answer, []
        if isinstance(answer, ApiProblem):
            raise answer
        stored = await _store_jobs(connection, jobs, lane_of, now)
        for i, (id_, request) in enumerate(jobs):
            if id_ not in stored:
                raise _taken_at(i, request.spec)
        staged = await _give_first_fires(connection, jobs, now, horizon)
        await audit.record(connection, audit.entry(who, "job.create", f"job:{ids[0]}", jobs=ids))
    SUBMITTED.inc(len(jobs))
    return Stored(ids, now), staged


def _refuse_twins(requests: Sequence[JobRequest]) -> None:
    names: set[str] = set()
    for i, request in enumerate(requests):
        if request.spec.name in names:
            raise _taken_at(i, request.spec)
        if request.spec.name is not None:
            names.add(request.spec.name)


def _taken_at(i: int, spec: JobSpec) -> Conflict:
    problem = _name_taken(spec)
    problem.errors = [{"path": f"jobs[{i}].name", "code": problem.code, "message": problem.detail}]
    return problem
