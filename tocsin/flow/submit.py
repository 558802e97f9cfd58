"""submit: store jobs and the runs asked for by hand, many calls in one commit, then acknowledge.

A job that is due within the horizon gets its run at once; any other gets a cursor that the planner follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from tocsin.errors import ApiProblem, Conflict, Contention, InvalidInput, NotFound
from tocsin.flow.shared import audit, calendars, circuits, dependencies, parcels, triggers
from tocsin.flow.shared.calendars import CalendarKey, Known, Use
from tocsin.flow.shared.contents import uses_of
from tocsin.flow.shared.dependencies import NO_LINKS, Child, Links
from tocsin.flow.shared.documents import NEW_RUN, run_document
from tocsin.flow.shared.idempotency import Replay, Wish
from tocsin.flow.shared.jobs import columns_of, key_of_run, name_taken, within_scope
from tocsin.flow.shared.joins import hold_graph
from tocsin.flow.shared.lanes import LaneBook, LaneKey, lane_key
from tocsin.flow.shared.nodes import Nodes
from tocsin.flow.shared.nodes import store as store_nodes
from tocsin.flow.shared.sealing import unknown_secrets
from tocsin.flow.shared.transitions import Hint, Key, NewRun, hints, stage
from tocsin.model.access import Identity
from tocsin.model.calendars import Calendar
from tocsin.model.ids import new_id, new_ids
from tocsin.model.job import JobSpec, RunRequest, check
from tocsin.model.packed import Packed
from tocsin.model.schedule import check_calendar, check_schedule, first_fire, seed_of, stands_for
from tocsin.model.targets import content_of
from tocsin.store.db import Connection, Database, Row, Sql, UniqueViolation, columns, sparse_columns
from tocsin.telemetry import SUBMITTED
from tocsin.wire import encode

SQL = Sql(__file__)


class JobRequest(NamedTuple):
    """One job that somebody wants stored; its document and its schedule also as the text they are kept as."""

    who: Identity
    spec: JobSpec
    spec_json: str
    schedule_json: str | None
    wish: Wish | None

    @property
    def by_calendar(self) -> bool:
        """Whether when it falls due is not told by its document alone."""
        return self.spec.schedule is not None and self.spec.schedule.calendar is not None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of its document lies in object storage: that may only seem so."""
        return self.spec.sealed is UNSET and '"$payload"' not in self.spec_json


class RunsRequest(NamedTuple):
    """Runs of one job that somebody wants; one audit row and one idempotency record for all of them."""

    who: Identity
    job_id: str
    runs: Sequence[RunRequest]
    trigger: str
    wish: Wish | None
    status: int = 202
    packed: Mapping[int, Packed] = {}  # of the runs whose arguments are not kept as they are, by their place
    pepper: bytes = b""  # for concurrency keys that follow from sealed ones


class NotSealed(InvalidInput):
    """What is sensitive is to be sealed, and is not: who asks for its caller is to seal it and ask again."""


class Stored(NamedTuple):
    """The ids that were made, when; and the document of a run that was asked for alone."""

    ids: list[str]
    at: datetime
    run: dict[str, Any] | None = None


Answer = Stored | Replay | ApiProblem


def job_request(
    who: Identity, spec: JobSpec, wish: Wish | None, now: datetime, of_workflow: bool = False
) -> JobRequest:
    """Check a spec against the present and freeze it; raises what is wrong with it."""
    check(spec, of_workflow)
    within_scope(who, spec)
    if spec.sensitive is True and content_of(spec.target):
        raise NotSealed("what this job says is sensitive", code="not_sealed")
    schedule_json = None
    if spec.schedule is not None:
        check_schedule(spec.schedule, now)
        schedule_json = encode(spec.schedule).decode()
    return JobRequest(who, spec, encode(spec).decode(), schedule_json, wish)


class _NewJob(NamedTuple):
    """A job on its way into the tables: with its first run if that is due within the horizon, else with a cursor."""

    place: int
    id: str
    request: JobRequest
    lane: LaneKey
    cursor: datetime | None
    run: NewRun | None
    use: Use | None

    @property
    def counts(self) -> bool:
        """Whether its schedule may have so many occurrences only."""
        schedule = self.request.spec.schedule
        return schedule is not None and schedule.max_runs is not None

    @property
    def tenant_and_name(self) -> tuple[int, str]:
        """What no two open jobs have in common."""
        return self.request.who.tenant_id, self.request.spec.name or self.id


async def _new_jobs(
    requests: Sequence[JobRequest], now: datetime, horizon: timedelta, known: Mapping[CalendarKey, Known]
) -> list[_NewJob]:
    out = []
    for place, (id_, request) in enumerate(zip(new_ids(now, len(requests)), requests, strict=True)):
        key = _calendar(request)
        found = None if key is None else known.get(key)
        use = None if key is None or found is None else Use(key.tenant_id, id_, key.name, found.version)
        await _give_way(request)
        first = _first(id_, request, now, horizon, found and found.calendar)
        out.append(_NewJob(place, id_, request, lane_key(request.spec), *first, use))
    return out


async def _give_way(request: JobRequest) -> None:
    """Give the event loop a turn before a search that may read years of days: a batch has up to a thousand such
    searches."""
    schedule = request.spec.schedule
    if schedule is not None and (schedule.rrule is not None or schedule.calendar is not None):
        await asyncio.sleep(0)


def _calendar(request: JobRequest) -> CalendarKey | None:
    return calendars.key_of(request.who.tenant_id, request.spec.schedule)


async def _calendars(
    db: Database, requests: Sequence[JobRequest], now: datetime
) -> tuple[dict[CalendarKey, Known], dict[int, InvalidInput]]:
    """The calendars that these jobs name, and those jobs that cannot go by theirs."""
    named = {i: key for i, request in enumerate(requests) if (key := _calendar(request)) is not None}
    if not named:
        return {}, {}
    async with db.transaction("submit") as connection:
        known = await calendars.read(connection, named.values())
    refused: dict[int, InvalidInput] = {}
    for i, key in named.items():
        who, spec = requests[i].who, requests[i].spec
        try:
            if key not in known:
                raise calendars.unknown(key.name)
            if spec.schedule is not None:
                await _give_way(requests[i])
                check_calendar(spec.schedule, known[key].calendar, now, seed_of(who.tenant, spec.name, ""))
        except InvalidInput as problem:
            refused[i] = problem
    return known, refused


async def _without_secrets(db: Database, requests: Sequence[JobRequest]) -> dict[int, InvalidInput]:
    """Those jobs that name a secret that there is not."""
    named = {i: (r.who.tenant_id, r.spec.secrets) for i, r in enumerate(requests) if r.spec.secrets}
    if not named:
        return {}
    async with db.transaction("submit") as connection:
        return await unknown_secrets(connection, named)


def _first(
    id_: str, request: JobRequest, now: datetime, horizon: timedelta, calendar: Calendar | None
) -> tuple[datetime | None, NewRun | None]:
    who, spec = request.who, request.spec
    first = first_fire(spec.schedule, now, None, seed_of(who.tenant, spec.name, id_), calendar)
    if first is None or not spec.once or first > now + horizon:
        return first, None
    return None, NewRun(who.tenant_id, new_id(max(first, now)), id_, "schedule", stands_for(spec.schedule, now))


async def submit_jobs(
    db: Database, lanes: LaneBook, requests: Sequence[JobRequest], horizon: timedelta
) -> tuple[list[Answer], list[Hint]]:
    """Store every job that can be stored; answers in the order of the requests. One commit, unless a name is taken."""
    now = db.clock.now()
    known, refused_days = await _calendars(db, requests, now)
    jobs = await _new_jobs(requests, now, horizon, known)
    lane_of = await lanes.intern({job.lane: job.request.who.tenant_id for job in jobs})
    answers: dict[int, Answer] = {}
    for job in jobs:
        if refusal := lanes.refusal("pool", job.lane, job.request.who.tenant_id):
            answers[job.place] = refusal
    answers |= refused_days | await _without_secrets(db, requests)
    found: list[Hint] = []
    without_twins = False
    # What depends on others may have to wait for its turn: nobody is to wait with it.
    for job in jobs:
        if job.request.spec.depends_on and job.place not in answers:
            answers |= await _commit_child(db, job, lane_of, now)
    while batch := [job for job in jobs if job.place not in answers]:
        if without_twins:
            batch = list({job.tenant_and_name: job for job in reversed(batch)}.values())
        try:
            done, staged = await _commit_jobs(db, batch, lane_of, now)
        except UniqueViolation:
            refused = await _names_taken(db, batch)
            if not refused and without_twins:
                raise Contention("a name was taken and freed at the same moment; try again") from None
            answers |= refused
            without_twins = not refused
        else:
            answers |= done
            found += staged
    return [answers[i] for i in range(len(requests))], found


async def _commit_jobs(
    db: Database, jobs: Sequence[_NewJob], lane_of: dict[LaneKey, int], now: datetime
) -> tuple[dict[int, Answer], list[Hint]]:
    """All of them, but for those that are replays; raises NameTaken and stores none."""
    alone = not any(job.run or job.use or job.request.wish or job.counts or _rare(job.request) for job in jobs)
    async with db.transaction("submit", alone=alone) as connection:
        answers = await _replays(connection, {job.place: (job.request.wish, 201, [job.id]) for job in jobs})
        new = [job for job in jobs if job.place not in answers]
        links = await _links(connection, new, now)
        await _store_jobs(connection, new, lane_of, now, links)
        staged = hints(await stage(connection, [job.run for job in new if job.run is not None]))
    SUBMITTED.inc(len(new))
    return answers | {job.place: Stored([job.id], now) for job in new}, staged


async def _commit_child(db: Database, job: _NewJob, lane_of: dict[LaneKey, int], now: datetime) -> dict[int, Answer]:
    """A job that depends on others, by itself."""
    try:
        return (await _commit_jobs(db, [job], lane_of, now))[0]
    except UniqueViolation:
        refused = await _names_taken(db, [job])
        return refused or {job.place: Contention("a name was taken and freed at the same moment; try again")}
    except InvalidInput as problem:
        return {job.place: problem}


async def _names_taken(db: Database, jobs: Sequence[_NewJob]) -> dict[int, Answer]:
    """Those whose name an open job has, unless they repeat the very call that took it."""
    wishes = [job.request.wish for job in jobs]
    batch = [
        (*job.tenant_and_name, wish and wish.key, i) for i, (job, wish) in enumerate(zip(jobs, wishes, strict=True))
    ]
    rows = await db.fetch("engine", SQL["names_taken"], *columns(batch, 4))
    return {jobs[row["i"]].place: name_taken(jobs[row["i"]].request.spec) for row in rows}


async def submit_runs(db: Database, requests: Sequence[RunsRequest]) -> tuple[list[Answer], list[Hint]]:
    """Make runs of existing jobs, many calls in one transaction; answers in the order of the requests."""
    now = db.clock.now()
    ids = [new_ids(now, len(r.runs)) for r in requests]
    answers: dict[int, Answer] = {}
    async with db.transaction("submit") as connection:
        answers |= await _replays(connection, {i: (r.wish, r.status, ids[i]) for i, r in enumerate(requests)})
        open_ = [i for i in range(len(requests)) if i not in answers]
        jobs = await _held_jobs(connection, [(requests[i].who.tenant_id, requests[i].job_id) for i in open_])
        found = {i: _no_more_runs(requests[i], jobs) for i in open_}
        refused = {i: problem for i, problem in found.items() if problem is not None}
        answers |= _followers(answers, {ids[i][0]: problem for i, problem in refused.items()}) | refused
        await _drop_keys(connection, [requests[i].wish for i in refused])
        open_ = [i for i in open_ if i not in answers]
        rows = await stage(connection, [run for i in open_ for run in _new_runs(requests[i], ids[i], jobs)])
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
            "args": _kept_args(request, 0, None),
            "tags": job["tags"],
            "trigger": request.trigger,
        }
    )


def _new_runs(request: RunsRequest, ids: list[str], jobs: Mapping[tuple[int, str], Row]) -> list[NewRun]:
    tenant_id, template = request.who.tenant_id, jobs[request.who.tenant_id, request.job_id]["key_template"]
    out = []
    for place, (id_, run) in enumerate(zip(ids, request.runs, strict=True)):
        at = run.at.at if run.at is not None else None
        args = encode(run.args).decode() if isinstance(run.args, dict) else None
        packed = request.packed.get(place)
        key = key_of_run(tenant_id, template, args, request.pepper if packed and packed.data_key else b"")
        if request.packed:
            args = _kept_args(request, place, key)
        out.append(NewRun(tenant_id, id_, request.job_id, request.trigger, at, run.priority, args, key_id=key))
    return out


def _kept_args(request: RunsRequest, place: int, key: str | None) -> str | None:
    """A run's arguments as its row keeps them."""
    packed, args = request.packed.get(place), request.runs[place].args
    if packed is not None:
        return msgspec.structs.replace(packed, key_id=key).text
    return encode(args).decode() if isinstance(args, dict) else None


def _no_more_runs(request: RunsRequest, jobs: Mapping[tuple[int, str], Row]) -> ApiProblem | None:
    job = jobs.get((request.who.tenant_id, request.job_id))
    if job is None:
        return NotFound("there is no such job")
    if job["node"] is not None:
        return Conflict("this job is run by its workflow only", code="part_of_workflow")
    state = job["state"]
    if state in ("cancelled", "completed"):
        return Conflict(f"the job is {state} and takes no more runs", code=f"job_{state}")
    if job["sensitive"] and not all(_is_sealed(request, place) for place in range(len(request.runs))):
        return NotSealed("the arguments of this job's runs are sensitive", code="not_sealed")
    return None


def _is_sealed(request: RunsRequest, place: int) -> bool:
    """Whether nothing of a run's arguments can be read; there may be none."""
    packed = request.packed.get(place)
    return not isinstance(request.runs[place].args, dict) or (packed is not None and packed.data_key > 0)


async def _held_jobs(connection: Connection, keys: list[tuple[int, str]]) -> dict[tuple[int, str], Row]:
    rows = await connection.fetch(SQL["open_jobs"], *columns(sorted(set(keys)), 2))
    return {(row["tenant_id"], row["id"]): row for row in rows}


async def _replays(connection: Connection, wishes: dict[int, tuple[Wish | None, int, list[str]]]) -> dict[int, Answer]:
    """Claim each idempotency key for its call; those taken already answer what the first call did."""
    wanted = [(i, wish, status, ids) for i, (wish, status, ids) in wishes.items() if wish is not None]
    if not wanted:
        return {}
    # In the order of the keys, as every node takes them: two commits that share keys wait, and never in a circle.
    batch = sorted((*wish[:3], status, f"{{{','.join(ids)}}}") for _, wish, status, ids in wanted)
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
            if wish.asks_for(row["digest"])
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


async def _links(connection: Connection, jobs: Sequence[_NewJob], now: datetime, path: str = "") -> Links:
    """What these new jobs depend on: on each other, and on jobs that there are, which are held from here on."""
    children = [Child(j.id, j.request.spec.parents, path.format(j.place)) for j in jobs if j.request.spec.depends_on]
    if not children:
        return NO_LINKS
    who, new = jobs[0].request.who, {job.id: job.request.spec for job in jobs}
    await hold_graph(connection, who.tenant_id)
    parents = await dependencies.hold(connection, who, children, {s.name: id_ for id_, s in new.items() if s.name})
    concerned = new.keys() & {*parents, *(parent for wanted in parents.values() for parent in wanted)}
    members = {id_: dependencies.member(who, id_, new[id_].name, new[id_].schedule, now) for id_ in concerned}
    return await dependencies.check(connection, who, children, parents, members)


async def _store_jobs(
    connection: Connection,
    jobs: Sequence[_NewJob],
    lane_of: dict[LaneKey, int],
    now: datetime,
    links: Links,
    audited: bool = True,
) -> None:
    """Jobs, cursors, limits and audit rows, in one statement; in others, which calendars they go by, and counts."""
    rows = [
        (
            who.tenant_id,
            job.id,
            spec.name,
            job.request.spec_json,
            lane_of[job.lane],
            *columns_of(spec, who.tenant_id),
            job.cursor,
            who.actor if audited else None,
            who.key_id if audited else None,
            job.request.schedule_json,
            audit.digest(job.request.spec_json) if audited else None,
            who.address or None,
            who.request_id or None,
        )
        # In the order of the names, as every node takes them: two commits that share names never wait in a circle.
        for job in sorted(jobs, key=_tenant_and_name)
        for who, spec in [(job.request.who, job.request.spec)]
    ]
    if rows:
        # `now` is the very instant the first fires are counted from: `every` is anchored at it.
        await connection.execute(SQL["store"], *sparse_columns(rows), now)
        await calendars.use(connection, [job.use for job in jobs if job.use is not None])
        await circuits.use(connection, [circuits.use_of(*use) for use in map(_circuit, jobs) if use[1] is not None])
        counted = [Key(job.request.who.tenant_id, job.id) for job in jobs if job.counts]
        await triggers.begin_counting(connection, counted)
        sensitive = [(job.request.who.tenant_id, job.id) for job in jobs if job.request.spec.sensitive is True]
        if sensitive:
            await connection.execute(SQL["mark_sensitive"], *columns(sensitive, 2))
        apart = [(job.request.who.tenant_id, job.id, job.request.spec) for job in jobs if not job.request.is_whole]
        await parcels.use(connection, [use for each in apart for use in uses_of(*each)])
        await dependencies.keep(connection, jobs[0].request.who.tenant_id, links)


_tenant_and_name = attrgetter("tenant_and_name")


def _rare(request: JobRequest) -> bool:
    """Whether it takes more than one statement to store such a job."""
    spec = request.spec
    return spec.circuit_name is not None or spec.sensitive is True or bool(spec.depends_on) or not request.is_whole


def _circuit(job: _NewJob) -> tuple[Key, str | None]:
    return Key(job.request.who.tenant_id, job.id), job.request.spec.circuit_name


# ── batches of jobs ──────────────────────────────────────────────────────────────────────────────────────────────


async def submit_batch(
    db: Database,
    lanes: LaneBook,
    requests: Sequence[JobRequest],
    wish: Wish | None,
    horizon: timedelta,
    nodes: Nodes | None = None,
) -> tuple[Stored | Replay, list[Hint]]:
    """Store all of one caller's jobs or none, in one transaction; raises why none. One audit row, one key. With `nodes`
    there is one, and it is a workflow."""
    now = db.clock.now()
    known, refused_days = await _calendars(db, requests, now)
    for i, problem in (refused_days | await _without_secrets(db, requests)).items():
        raise _in_batch(i, problem)
    jobs = await _new_jobs(requests, now, horizon, known)
    lane_of = await lanes.intern({job.lane: job.request.who.tenant_id for job in jobs})
    for job in jobs:
        if refusal := lanes.refusal(f"jobs[{job.place}].pool", job.lane, job.request.who.tenant_id):
            raise refusal
    _refuse_twins(requests)
    try:
        answer, staged = await _commit_batch(db, jobs, lane_of, wish, now, nodes)
    except UniqueViolation:
        refused = await _names_taken(db, jobs)
        if not refused:
            raise Contention("a name was taken and freed at the same moment; try again") from None
        raise _taken_at(min(refused), requests[min(refused)].spec) from None
    return answer, staged


async def _commit_batch(
    db: Database,
    jobs: Sequence[_NewJob],
    lane_of: dict[LaneKey, int],
    wish: Wish | None,
    now: datetime,
    nodes: Nodes | None,
) -> tuple[Stored | Replay, list[Hint]]:
    ids = [job.id for job in jobs]
    who = jobs[0].request.who
    async with db.transaction("submit") as connection:
        known = (await _replays(connection, {0: (wish, 201, ids)})).get(0)
        if isinstance(known, Replay):
            return known, []
        if isinstance(known, ApiProblem):
            raise known
        links = await _links(connection, jobs, now, "jobs[{}].")
        await _store_jobs(connection, jobs, lane_of, now, links, audited=False)
        if nodes is not None:
            await store_nodes(connection, who, ids[0], nodes)
        staged = hints(await stage(connection, [job.run for job in jobs if job.run is not None]))
        entry = audit.entry(who, "job.create", f"job:{ids[0]}", jobs=ids)
        await audit.record(connection, entry.changing(None, "\n".join(job.request.spec_json for job in jobs)))
    SUBMITTED.inc(len(jobs))
    return Stored(ids, now), staged


def _in_batch(i: int, problem: InvalidInput) -> InvalidInput:
    problem.errors = [error | {"path": f"jobs[{i}].{error['path']}"} for error in problem.errors or []]
    return problem


def _refuse_twins(requests: Sequence[JobRequest]) -> None:
    names: set[str] = set()
    for i, request in enumerate(requests):
        if request.spec.name in names:
            raise _taken_at(i, request.spec)
        if request.spec.name is not None:
            names.add(request.spec.name)


def _taken_at(i: int, spec: JobSpec) -> Conflict:
    problem = name_taken(spec)
    problem.errors = [{"path": f"jobs[{i}].name", "code": problem.code, "message": problem.detail}]
    return problem
