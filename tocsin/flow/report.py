"""report: end attempts. History row, then the next attempt or the end, for many workers in one commit.

The guard is (run, attempt, fence): a stale report finds nothing, changes nothing, and is answered `superseded`.
A result that is too large for its row lies in object storage before the transaction that says so (`set_apart`).
One bad row never fails its neighbours: a batch that the database refuses for its data is halved until it is found.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tocsin.errors import PartitionMissing, Unavailable
from tocsin.flow.shared import circuits, parcels
from tocsin.flow.shared.circuits import Called
from tocsin.flow.shared.cold import day_of
from tocsin.flow.shared.joins import NOBODY, settle
from tocsin.flow.shared.parcels import RESULTS, Parcels, Use
from tocsin.flow.shared.specs import SpecBook
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Hint, Key, gates, hints, lock_jobs, lock_limits, release
from tocsin.model.circuit import Call
from tocsin.model.ids import parse_id
from tocsin.model.job import Retry
from tocsin.model.packed import LARGE, MOST_RESULT
from tocsin.model.retry import SHORTEST_SPREAD, RetryBudgets, after_failure, after_loss
from tocsin.store.db import Connection, Database, Row, Sql, columns, is_contention, is_data_error, sparse_columns
from tocsin.telemetry import DEAD_LETTERS, REPORTED, SSRF_BLOCKED, STEP_SECONDS, STRETCHED, SUPERSEDED, get_logger
from tocsin.wire import Finished, RunKey, encode

SQL = Sql(__file__, SHARED)
log = get_logger("report")
USAGE_LIMIT = 65_536
ERROR_LIMIT = 8_192
_TRIES = 5
_MOST_PROBES = 100_000  # look-ups of reports that do not name their tenant, in one commit
_LONGEST_MS = 1e12
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class Ending(NamedTuple):
    """One reported end of an attempt, with the worker that reports it.

    `plain`: a success of a run that is known to end nothing but itself (no one-time job, no limit, nobody queued
    behind it), so that there is nothing to look up before. `use`: its result lies in object storage, and what it is
    told with is the reference to that.
    """

    worker_id: str
    finished: Finished
    plain: bool = False
    use: Use | None = None


class Reported(NamedTuple):
    """Which endings took effect (now or when first told), and where runs became claimable by it."""

    accepted: set[RunKey]
    hints: list[Hint]
    heads: bool = False  # whether a workflow run has come to its end
    fills: bool = False  # whether a run of a backfill may have
    folded: bool = False  # whether a node is to be unfolded
    postponed: frozenset[RunKey] = frozenset()  # neither accepted nor superseded: the worker must report them again


class _Means(NamedTuple):
    """By what it is decided what follows: chance, the budgets of retries if there are any, and over how many seconds
    lost runs come back."""

    rng: random.Random
    budgets: RetryBudgets | None
    spread: float


class _Next(NamedTuple):
    """The state that follows, after how many seconds if that is another attempt, and why so late if that is later than
    its job says."""

    state: str
    delay: float = 0.0
    reason: str | None = None


class _Special(NamedTuple):
    """What `look` says of the endings that need more than the one statement."""

    verdicts: dict[int, _Next]
    once: set[Key]
    limited: set[Key]
    released: set[Key]
    called: dict[int, Called]
    awaited: bool  # others wait for one of them
    fills: bool  # one of them is of a backfill


async def report(
    db: Database,
    specs: SpecBook,
    endings: Sequence[Ending],
    rng: random.Random,
    *,
    budgets: RetryBudgets | None = None,
    spread: float = SHORTEST_SPREAD,
) -> Reported:
    """End these attempts. Data errors are bisected to the offender, contention retries the whole."""
    return await _report(db, specs, endings, _Means(rng, budgets, spread))


async def _report(db: Database, specs: SpecBook, endings: Sequence[Ending], means: _Means) -> Reported:
    for attempt in range(_TRIES):
        try:
            return await _report_once(db, specs, endings, means)
        except Exception as error:
            if is_contention(error) and attempt < _TRIES - 1:
                continue
            if isinstance(error, PartitionMissing):
                return await _postpone(db, specs, endings, means)
            if not is_data_error(error):
                raise
            return await _bisect(db, specs, endings, means, error)
    raise AssertionError("unreachable")


async def _bisect(
    db: Database, specs: SpecBook, endings: Sequence[Ending], means: _Means, error: Exception
) -> Reported:
    if len(endings) == 1:
        try:
            return await _report_once(db, specs, [_made_harmless(endings[0], error)], means)
        except Exception as again:
            if is_data_error(again):  # not even its key can be one of ours
                return Reported(set(), [])
            if isinstance(again, PartitionMissing):
                return Reported(set(), [], postponed=frozenset({_key(endings[0])}))
            raise
    return await _report_halves(db, specs, endings, means)


async def _postpone(db: Database, specs: SpecBook, endings: Sequence[Ending], means: _Means) -> Reported:
    """Postpone the ends of runs whose day has no partition yet; their workers keep them. The other ends take effect."""
    made = {row["name"] for row in await db.fetch("vital", SQL["partitions"])}
    there = [e for e in endings if f"history_{day_of(e.finished.run_id):%Y%m%d}" in made]
    if len(there) < len(endings):
        postponed = frozenset(map(_key, endings)) - frozenset(map(_key, there))
        done = await _report(db, specs, there, means) if there else Reported(set(), [])
        return done._replace(postponed=done.postponed | postponed)
    if len(endings) > 1:  # one of these ends also ends another run, whose day has no partition
        return await _report_halves(db, specs, endings, means)
    return Reported(set(), [], postponed=frozenset(map(_key, endings)))


async def _report_halves(db: Database, specs: SpecBook, endings: Sequence[Ending], means: _Means) -> Reported:
    half = len(endings) // 2
    left = await _report(db, specs, endings[:half], means)
    right = await _report(db, specs, endings[half:], means)
    return Reported(
        left.accepted | right.accepted,
        left.hints + right.hints,
        left.heads or right.heads,
        left.fills or right.fills,
        left.folded or right.folded,
        left.postponed | right.postponed,
    )


def _made_harmless(ending: Ending, error: Exception) -> Ending:
    """The same end without the payload that the database refuses; the outcome is what must not be lost."""
    f = ending.finished
    note = f"what the worker sent with this outcome could not be stored: {error}"
    return ending._replace(
        use=None,
        finished=Finished(
            run_id=f.run_id,
            attempt=f.attempt,
            fence=f.fence,
            tenant=f.tenant,
            outcome=f.outcome,
            result={"tocsin_note": note[:500]},
        ),
    )


async def _report_once(db: Database, specs: SpecBook, endings: Sequence[Ending], means: _Means) -> Reported:
    # An attempt told twice in one batch (a repeat that overtook its answer) counts once.
    unique = {(e.finished.run_id, e.finished.fence, e.worker_id): e for e in endings}
    batch = sorted(unique.values(), key=_run_id)  # the order in which the rows are locked
    if all(e.plain for e in batch):
        return await _report_plain(db, batch, {_key(e) for e in batch})
    keys = [(e.worker_id, e.finished.run_id, e.finished.fence, e.finished.outcome) for e in batch]
    async with db.transaction("report", "vital") as connection:
        special = await _look(connection, specs, keys, batch, means)
        await lock_jobs(connection, special.once)
        await lock_limits(connection, special.limited)
        told = [_columns_of(e, special.verdicts.get(i, _SUCCEEDED)) for i, e in enumerate(batch)]
        rows = await connection.fetch(SQL["finish"], *sparse_columns(told))
        freed = await release(connection, special.released)
        settled = await settle(connection, rows) if special.awaited else NOBODY
        done = {(row["id"], row["fence"]) for row in rows}
        await parcels.use(connection, (e.use for e in batch if e.use is not None and _key(e) in done))
        await circuits.count(connection, [told for i, told in special.called.items() if _key(batch[i]) in done])
    repeated, postponed = await _repeated(db, [e for e in batch if _key(e) not in done])
    accepted = done | repeated
    _count(batch, done, len(accepted) + len(postponed))
    DEAD_LETTERS.inc(sum(verdict.state == "dead" and _key(batch[i]) in done for i, verdict in special.verdicts.items()))
    woken = hints([row for row in rows if row["lane_id"] is not None]) + hints(freed) + settled.hints
    return Reported(accepted, woken, settled.heads, special.fills, settled.folded, postponed)


async def _report_plain(db: Database, batch: list[Ending], keys: set[RunKey]) -> Reported:
    """The hot path: one statement, one commit, and only the columns that say something."""
    ends = [e.finished for e in batch]
    await db.failpoints.hit("report.before_commit")
    with STEP_SECONDS.labels("report").time():
        rows = await db.fetch(
            "vital",
            SQL["finish"],
            [e.worker_id for e in batch],
            [f.run_id for f in ends],
            [f.fence for f in ends],
            *([], [], []),
            [f.held_ms if 0 <= f.held_ms < _LONGEST_MS else 0.0 for f in ends],
            [f.ran_ms if 0 <= f.ran_ms < _LONGEST_MS else 0.0 for f in ends],
            *([], [], []),
            _unless_empty([None if f.result is None else _bounded(f.result, MOST_RESULT) for f in ends]),
            _unless_empty([None if f.usage is None else _bounded(f.usage, USAGE_LIMIT) for f in ends]),
            [],
        )
    await db.failpoints.hit("report.after_commit")
    REPORTED.labels("succeeded").inc(len(rows))
    if len(rows) == len(batch):
        return Reported(keys, [])
    done = {(row["id"], row["fence"]) for row in rows}
    repeated, postponed = await _repeated(db, [e for e in batch if _key(e) not in done])
    accepted = done | repeated
    SUPERSEDED.inc(len(batch) - len(accepted) - len(postponed))
    return Reported(accepted, [], postponed=postponed)


def _unless_empty(column: list[str | None]) -> list[str | None]:
    return column if any(column) else []


_SUCCEEDED = _Next("succeeded")
_TELLING = ("succeeded", "failed", "timeout")  # outcomes that say something about what was called
_ANSWERED = ("status_4xx", "arguments", "refused_address")  # failures that are the caller's own


def _run_id(ending: Ending) -> str:
    return ending.finished.run_id


def _key(ending: Ending) -> RunKey:
    return ending.finished.run_id, ending.finished.fence


async def _look(
    connection: Connection,
    specs: SpecBook,
    keys: Sequence[tuple[str, str, int, str]],
    batch: list[Ending],
    means: _Means,
) -> _Special:
    rows = await connection.fetch(SQL["look"], *columns(keys, 4))
    failed = [row for row in rows if batch[row["n"] - 1].finished.outcome in ("failed", "timeout")]
    known = await specs.get(((row["tenant_id"], row["job_id"], row["job_version"]) for row in failed), connection)
    awaited, fills = any(row["awaited"] for row in rows), any(row["fills"] for row in rows)
    special = _Special({}, set(), set(), set(), {}, awaited, fills)
    for row in rows:
        finished = batch[row["n"] - 1].finished
        job = Key(row["tenant_id"], row["job_id"])
        stored = known.get((row["tenant_id"], row["job_id"], row["job_version"]))
        special.verdicts[row["n"] - 1] = _verdict(row, finished, stored.spec.retry if stored else None, means)
        if row["once"]:
            special.once.add(job)
        if row["limited"]:
            special.limited.update(gates(job, row["key_id"]))
        if row["limited"] or row["queues"]:
            special.released.update(gates(job, row["key_id"]))
        if row["circuit_id"] is not None and finished.outcome in _TELLING:
            call = Call(row["claimed_at"], row["canary"], _speaks_against(finished))
            special.called[row["n"] - 1] = Called(Key(job.tenant_id, row["circuit_id"]), call)
    return special


def _speaks_against(finished: Finished) -> bool:
    """Whether an end says that what was called does not work. What refuses a request works."""
    error = finished.error
    return finished.outcome != "succeeded" and (error is None or error.class_ not in _ANSWERED)


def _verdict(row: Row, finished: Finished, retry: Retry | None, means: _Means) -> _Next:
    if finished.outcome == "succeeded":
        return _SUCCEEDED
    if finished.outcome == "cancelled":
        return _Next("cancelled")
    if finished.outcome == "lost":
        delay = None if finished.give_up else after_loss(row["losses"] + 1, means.rng, means.spread).delay
        return _Next("dead") if delay is None else _Next("staged", delay)
    delay = _delay(row, finished, retry, means) if retry else None
    if delay is None:
        return _Next("dead")
    late = means.budgets.stretch(row["tenant_id"], row["job_id"], time.monotonic()) if means.budgets else 0.0
    if not late:
        return _Next("staged", delay)
    STRETCHED.inc()
    return _Next("staged", delay + late, "retry_budget")


def _delay(row: Row, finished: Finished, retry: Retry, means: _Means) -> float | None:
    error_class = finished.error.class_ if finished.error else None
    asked = finished.retry_after
    # A number that is none (it may be sent as such) asks for nothing.
    asked = None if asked is None or asked != asked else asked
    left_alone = finished.not_before or 0.0
    return after_failure(
        retry,
        row["failures"] + 1,
        error_class,
        means.rng,
        asked=asked,
        give_up=finished.give_up,
        not_before=left_alone if left_alone > 0 else 0.0,
    ).delay


def _columns_of(ending: Ending, verdict: _Next) -> tuple[Any, ...]:
    f = ending.finished
    error = f.error
    ended_well = verdict is _SUCCEEDED
    return (
        ending.worker_id,
        f.run_id,
        f.fence,
        None if ended_well else f.outcome,
        None if ended_well else verdict.state,
        None if ended_well else verdict.delay,
        f.held_ms if 0 <= f.held_ms < _LONGEST_MS else 0.0,
        f.ran_ms if 0 <= f.ran_ms < _LONGEST_MS else 0.0,
        f.exit_code,
        None if error is None else _storable(error.class_[:256]),
        None if error is None else _storable(error.message[:ERROR_LIMIT]),
        None if f.result is None else _bounded(f.result, MOST_RESULT),
        None if f.usage is None else _bounded(f.usage, USAGE_LIMIT),
        verdict.reason,
    )


def _storable(text: str) -> str:
    """Characters that PostgreSQL refuses are written as their escape, never rejected."""
    return _UNSTORABLE.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def _encoded(value: Any) -> bytes:
    """Return a result or usage as JSON. One that could be read, but is nested too deeply to be written from here, must
    not stop the other ends of the commit."""
    try:
        return encode(value)
    except RecursionError:
        return encode({"tocsin_note": "this was nested too deeply to be stored"})


def _bounded(value: Any, most: int) -> str:
    data = _encoded(value)
    if len(data) <= most:
        return data.decode()
    return encode({"tocsin_truncated": True, "bytes": len(data), "head": data[:1024].decode(errors="ignore")}).decode()


async def _repeated(db: Database, endings: Sequence[Ending]) -> tuple[set[RunKey], frozenset[RunKey]]:
    """Return which of these ends were accepted before, and which must be reported again because the search was cut
    short."""
    hinted = [e for e in endings if e.finished.tenant]
    others = [e for e in endings if not e.finished.tenant]
    found: set[RunKey] = set()
    if hinted:
        rows = await db.fetch("vital", SQL["repeated"], *columns([_lookup(e) for e in hinted], 6))
        found = {(row["id"], row["fence"]) for row in rows}
    if not others:
        return found, frozenset()
    lookups = columns([_lookup(e) for e in others], 6)[:5]
    rows = await db.fetch("vital", SQL["repeated_anywhere"], *lookups, _MOST_PROBES)
    found |= {_key(others[row["n"] - 1]) for row in rows if row["found"]}
    return found, frozenset(map(_key, others[len(rows) :]))


def _lookup(ending: Ending) -> tuple[str, str, int, int, str, int]:
    f = ending.finished
    tenant = f.tenant if 0 <= f.tenant < 2**31 else -1  # not a tenant's number: matches nothing
    return ending.worker_id, f.run_id, f.attempt, f.fence, f.outcome, tenant


def _count(batch: list[Ending], done: set[RunKey], answered: int) -> None:
    ended = [e.finished for e in batch if _key(e) in done]
    for outcome, count in Counter(f.outcome for f in ended).items():
        REPORTED.labels(outcome).inc(count)
    SSRF_BLOCKED.inc(sum(f.error is not None and f.error.class_ == "refused_address" for f in ended))
    SUPERSEDED.inc(len(batch) - answered)


class Returned(NamedTuple):
    """One run that a living worker hands back, or that is taken back from it, before it started. It must not be claimed
    again for this many seconds."""

    worker_id: str
    run_id: str
    fence: int
    delay: float = 0.0


def _returned_run(returned: Returned) -> str:
    return returned.run_id


async def give_back(db: Database, returned: Sequence[Returned]) -> Reported:
    """Make these runs claimable again, at once or after their delay. This uses up no attempt."""
    in_order = sorted(returned, key=_returned_run)  # the order in which the rows are locked
    told = columns(in_order, 4)
    async with db.transaction("give_back", "vital") as connection:
        found = await connection.fetch(SQL["returning"], *told[:3])
        known = [(Key(row["tenant_id"], row["job_id"]), row) for row in found]
        await lock_jobs(connection, [job for job, row in known if row["once"]])
        limits = {key for job, row in known if row["gated"] for key in gates(job, row["key_id"])}
        await lock_limits(connection, limits)
        rows = await connection.fetch(SQL["give_back"], *told)
        ended = [row for row in rows if row["job_id"] is not None]
        freed = {key for row in ended for key in gates(Key(row["tenant_id"], row["job_id"]), row["key_id"])} & limits
        let_go = await release(connection, freed)
        settled = await settle(connection, ended)
    accepted = {(row["id"], row["fence"]) for row in rows}
    woken = hints([row for row in rows if row["ready_at"] is not None]) + hints(let_go) + settled.hints
    return Reported(accepted, woken, settled.heads, folded=settled.folded)


# ── large results ────────────────────────────────────────────────────────────────────────────────────────────────


def weigh(finished: Sequence[Finished]) -> bool:
    """Whether one of these results is too large for its row. From here on they are the JSON that is stored, so that
    nothing is encoded twice."""
    large = False
    for f in finished:
        if f.result is not None:
            f.result = msgspec.Raw(_encoded(f.result))
            large = large or len(f.result) > LARGE
    return large


async def set_apart(db: Database, store: Parcels, endings: Sequence[Ending], within: float) -> list[Ending]:
    """The same endings, of which what is too large for a row lies in object storage now. What cannot be put there
    `within` so many seconds stays in its row after all: the worker waits for the answer, or its lease would end."""
    large = {i: e for i, e in enumerate(endings) if _is_large(e.finished)}
    out = list(endings)
    if not large or not await store.understood(RESULTS):
        return out
    told = [(e.worker_id, e.finished.run_id, e.finished.fence) for e in large.values()]
    rows = await db.fetch("vital", SQL["whose"], *columns(told, 3))
    places = list(large)
    # Those that are not found have ended before, and nothing of them is stored.
    found = {places[row["n"] - 1]: row["tenant_id"] for row in rows}
    apart = await asyncio.gather(*(_set_apart(store, tenant, large[i], within) for i, tenant in found.items()))
    for i, ending in zip(found, apart, strict=True):
        out[i] = ending
    return out


def _is_large(f: Finished) -> bool:
    fits = not isinstance(f.result, msgspec.Raw) or len(f.result) <= LARGE
    return not fits and len(f.result) <= MOST_RESULT and parse_id(f.run_id) is not None and 0 <= f.fence < 2**63


async def _set_apart(store: Parcels, tenant_id: int, ending: Ending, within: float) -> Ending:
    f = ending.finished
    try:
        async with asyncio.timeout(within):
            parcel = await store.put(tenant_id, bytes(f.result))
    except (TimeoutError, Unavailable) as error:
        log.warning("a large result stays in the database", run=f.run_id, bytes=len(f.result), error=str(error))
        return ending
    use = Use(tenant_id, parcel.place(tenant_id), f.run_id, day_of(f.run_id))
    told = msgspec.structs.replace(f, result=msgspec.Raw(parcel.reference.encode()))
    return Ending(ending.worker_id, told, use=use)


async def claims_after(
    db: Database, worker_id: str, last_claim: int, heard: datetime | None = None, marked: int | None = None
) -> list[Returned]:
    """Runs of claims whose answer never reached this worker, which it proves by asking again without them; of those
    made before `heard`, and up to `marked`, if it says what it had heard of when it asked."""
    rows = await db.fetch("vital", SQL["claims_after"], worker_id, last_claim, heard, marked)
    return [Returned(worker_id, row["id"], row["fence"]) for row in rows]


class Known(NamedTuple):
    """An attempt by its fence: who holds or held it, how it ended if it has, and what is known of its run."""

    worker_id: str
    attempt: int
    outcome: str | None
    run: Row


async def attempt_of(db: Database, tenant_id: int, run_id: str, fence: int) -> Known | None:
    """The attempt that has this fence and a worker whose lease holds, or had this fence."""
    row = await db.fetchrow("vital", SQL["attempt_of"], tenant_id, run_id, fence)
    return None if row is None else Known(row["worker_id"], row["attempt"], row["outcome"], row)


class Held(NamedTuple):
    """What a worker holds by our book."""

    id: str
    fence: int
    claim_id: int
    state: str
    stop_reason: str
    claimed_before: bool


async def held(db: Database, worker_id: str, heard: datetime | None, marked: int | None) -> list[Held]:
    """All runs a worker holds, to be compared with what it says it has, and whether each was claimed before `heard` and
    up to `marked`: what it had heard of when it asked for those that are on their way."""
    return [Held(*row) for row in await db.fetch("vital", SQL["held"], worker_id, heard, marked)]
