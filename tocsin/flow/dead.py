"""dead: the dead-letter path, and running an ended run again. Both make new runs that name their origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tocsin.clock import iso
from tocsin.errors import Conflict, Forbidden, NotFound
from tocsin.flow.shared import audit, cold, noderuns, windows
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.flow.shared.jobs import key_of_run
from tocsin.flow.shared.joins import parents_at
from tocsin.flow.shared.transitions import Family, Hint, Key, NewRun, hints, stage
from tocsin.model.access import Identity
from tocsin.model.ids import new_id, new_ids
from tocsin.model.packed import shown
from tocsin.model.workflow import workflow_of
from tocsin.store.db import Connection, Database, Row, Sql
from tocsin.store.parquet import Parquet
from tocsin.wire import decode_job_spec

SQL = Sql(__file__)
MOST_PER_CALL = 5000
_ONLY = {"error_class": SQL["only_error_class"], "job": SQL["only_job"]}


async def list_dead(
    db: Database, who: Identity, job: str | None, error_class: str | None, before: str | None, limit: int
) -> windows.Listed:
    """List dead letters, newest first. A page reads a bounded number of letters."""
    given = {"tenant": who.tenant_id, "most": limit, "job": job, "error_class": error_class}
    given |= {"low": windows.LOWEST, "high": before or windows.HIGHEST}
    only = [condition for name, condition in _ONLY.items() if given[name] is not None]
    query = windows.Query("dead", SQL["list"], SQL["floor"], given, only, next(iter(only), None))
    looked = await windows.look(db, who, query)
    return windows.Listed(_letters(looked.rows), looked.floor)


def _letters(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [
        {
            "id": row["id"],
            "run_id": row["id"],
            "job_id": row["job_id"],
            "job_name": row["job_name"],
            "job_version": row["job_version"],
            "died_at": iso(row["died_at"]),
            "error": {"class": row["error_class"], "message": row["error"] or ""} if row["error_class"] else None,
            "args": shown(row["args"]),
            "tags": msgspec.Raw(row["tags"].encode()) if row["tags"] else {},
        }
        for row in rows
    ]


class Chosen(NamedTuple):
    """Which letters: those with these ids, all or nothing; or (without ids) the oldest that match."""

    ids: Sequence[str] | None = None
    job: str | None = None
    error_class: str | None = None
    tag: dict[str, str] | None = None

    @property
    def match(self) -> tuple[str | None, str | None, str | None]:
        """The filter, as the statements take it."""
        return self.job, self.error_class, msgspec.json.encode(self.tag).decode() if self.tag else None


class Redriven(NamedTuple):
    """The new runs, and how many letters that match are left (0 when ids were given)."""

    ids: list[str]
    remaining: int
    hints: list[Hint]


async def redrive(
    db: Database,
    who: Identity,
    chosen: Chosen,
    now: datetime,
    per_second: float | None,
    wish: Wish | None,
    most: int = MOST_PER_CALL,
) -> Redriven:
    """Each letter, of those that match at `most` so many, becomes a new run with its args; with a rate, one after the
    other from now on. Several of one workflow run become one, and those of one that is under way again become none."""
    async with db.tenant(who.tenant_id, "dead") as connection:
        await recall(connection, wish)
        letters = await _take(connection, who, chosen, cancelled_too=False, most=most)
        jobs = await _hold_jobs(connection, who, [letter["job_id"] for letter in letters])
        heads = {letter["id"]: letter["job_id"] for letter in letters if jobs[letter["job_id"]]["has_nodes"]}
        families = await _families(connection, who, list(heads))
        wanted = await _not_under_way(connection, who, chosen, letters, heads, families)
        new = [
            NewRun(
                who.tenant_id,
                id_,
                was["job_id"],
                "redrive",
                now + timedelta(seconds=i / per_second) if per_second and i else None,
                was["priority"],
                was["args"],
                was["id"],
                key_id=key_of_run(who.tenant_id, jobs[was["job_id"]]["key_template"], was["args"]),
                family=families.get(was["id"]) or Family(was["logical_at"]),
            )
            for i, (id_, was) in enumerate(zip(new_ids(now, len(wanted)), wanted, strict=True))
        ]
        rows = await stage(connection, new)
        left = await _remaining(connection, who, chosen)
        await audit.record(connection, audit.entry(who, "dead.redrive", "dead-letters", **_told(chosen, letters)))
        made = [run.id for run in new]
        await remember(connection, wish, 200, made)
    return Redriven(made, left, hints(rows))


async def discard(db: Database, who: Identity, chosen: Chosen, wish: Wish | None) -> tuple[int, int]:
    """The letters leave, their history stays; answers how many, and how many that match are left."""
    async with db.tenant(who.tenant_id, "dead") as connection:
        await recall(connection, wish)
        letters = await _take(connection, who, chosen, cancelled_too=True)
        left = await _remaining(connection, who, chosen)
        await audit.record(connection, audit.entry(who, "dead.discard", "dead-letters", **_told(chosen, letters)))
        await remember(connection, wish, 200, [letter["id"] for letter in letters])
    return len(letters), left


def _told(chosen: Chosen, letters: list[Any]) -> dict[str, Any]:
    if chosen.ids is not None:
        return {"ids": list(chosen.ids)}
    return {"filter": {"job": chosen.job, "error_class": chosen.error_class, "tag": chosen.tag}, "count": len(letters)}


async def remaining(db: Database, who: Identity, chosen: Chosen) -> int:
    """How many letters that match are left now."""
    async with db.tenant(who.tenant_id, "dead") as connection:
        return await _remaining(connection, who, chosen)


async def _remaining(connection: Connection, who: Identity, chosen: Chosen) -> int:
    if chosen.ids is not None:
        return 0
    return await connection.fetchval(SQL["remaining"], who.tenant_id, *chosen.match)  # type: ignore[no-any-return]


async def retry(
    db: Database, who: Identity, run_id: str, now: datetime, wish: Wish | None, parquet: Parquet | None = None
) -> tuple[str, list[Hint]]:
    """A new run of an ended one, with its args and the job's current version. Of a workflow run, or of a job of one, it
    goes on with that: by a new head, or, if it still runs, in it."""
    # Before the transaction, which is not to wait for files; most often there are none of its day.
    archived = await cold.attempts_of(db, parquet, who, run_id) if parquet is not None else []
    async with db.tenant(who.tenant_id, "dead") as connection:
        await recall(connection, wish)
        origin = archived[-1] if archived else await connection.fetchrow(SQL["origin"], who.tenant_id, run_id)
        if origin is None:
            raise NotFound("there is no ended run with this id")
        held = await _hold_jobs(connection, who, [origin["job_id"]])
        job = held[origin["job_id"]]
        if job["node"] is None and not job["has_nodes"]:
            at = _stands_for(origin)
            parents = None if at is None else await parents_at(connection, Key(who.tenant_id, job["id"]), at)
            made = await _again(connection, who, run_id, job, origin, Family(at, parents=parents), now)
        elif archived:
            raise _archived()
        elif job["node"] is not None and job["workflow_id"] not in held:
            raise Forbidden("this key is kept to other jobs than the workflow", code="out_of_scope")
        else:
            made = await _in_workflow(connection, who, run_id, job, origin, now)
        await audit.record(connection, audit.entry(who, "run.retry", f"run:{run_id}"))
        await remember(connection, wish, 202, [made[0]])
    return made


async def _again(
    connection: Connection,
    who: Identity,
    run_id: str,
    job: Row,
    origin: Row | Mapping[str, Any],
    family: Family,
    now: datetime,
) -> tuple[str, list[Hint]]:
    """A new run of a job, like `origin`, in place of a run."""
    key = key_of_run(who.tenant_id, job["key_template"], origin["args"])
    given = None, origin["priority"], origin["args"], run_id
    new = NewRun(who.tenant_id, new_id(now), job["id"], "retry", *given, key_id=key, family=family)
    return new.id, hints(await stage(connection, [new]))


def _stands_for(run: Row | Mapping[str, Any]) -> datetime | None:
    """The instant that an ended run stood for, if it is another than when it was asked for."""
    return run["logical_at"] or (run["scheduled_for"] if run["trigger"] == "schedule" else None)


async def _take(
    connection: Connection, who: Identity, chosen: Chosen, *, cancelled_too: bool, most: int = MOST_PER_CALL
) -> list[Any]:
    if chosen.ids is None:
        return await connection.fetch(  # type: ignore[no-any-return]
            SQL["take_matching"], who.tenant_id, *chosen.match, most, cancelled_too
        )
    letters = await connection.fetch(SQL["take"], who.tenant_id, list(chosen.ids))
    missing = set(chosen.ids) - {letter["id"] for letter in letters}
    if missing:
        raise NotFound(f"there is no dead letter {min(missing)}")
    return letters  # type: ignore[no-any-return]


async def _hold_jobs(connection: Connection, who: Identity, ids: Sequence[str]) -> dict[str, Row]:
    """Keep these jobs as they are; what of them matters to their new runs."""
    rows = await connection.fetch(SQL["hold_jobs"], who.tenant_id, sorted(set(ids)))
    held = {row["id"]: row for row in rows}
    gone = [id_ for id_ in {**dict.fromkeys(ids), **held} if id_ not in held or held[id_]["state"] == "cancelled"]
    if gone:
        raise Conflict(f"job {gone[0]} is cancelled and takes no more runs", code="job_cancelled")
    return held


# ── workflow runs ────────────────────────────────────────────────────────────────────────────────────────────────


async def _in_workflow(
    connection: Connection, who: Identity, run_id: str, job: Row, origin: Row, now: datetime
) -> tuple[str, list[Hint]]:
    """Go on with the workflow run that a run is a head of, or one of the nodes of; raises why that cannot be."""
    node, workflow_run_id = job["node"], origin["workflow_run_id"] or run_id
    if node is not None and origin["is_element"]:
        message = (
            f"this is one of the runs of {node}: retry run {origin['origin_run_id']}, which makes all of them anew"
        )
        raise Conflict(message, code="part_of_workflow")
    await connection.execute(SQL["go_on"], [workflow_run_id])
    last = await connection.fetchrow(SQL["last_head"], who.tenant_id, job["workflow_id"] or job["id"], workflow_run_id)
    if last is None or not last["whole"]:
        raise _archived()
    if last["live"]:
        if node is None:
            raise _under_way(workflow_run_id)
        made = await noderuns.again(connection, Key(who.tenant_id, last["run_id"]), workflow_run_id, node, run_id)
        return made.ids[node], made.settled.hints
    if node is not None:
        graph = workflow_of(decode_job_spec(last["spec"])).graph
        ends = await noderuns.ends_of(connection, who.tenant_id, workflow_run_id)
        noderuns.refuse_again(graph, ends, node, run_id)
    elif last["state"] == "succeeded":
        raise Conflict("nothing of this workflow run failed: run the workflow anew", code="nothing_failed")
    return await _again(connection, who, run_id, last, last, Family(last["logical_at"], workflow_run_id), now)


async def _not_under_way(
    connection: Connection,
    who: Identity,
    chosen: Chosen,
    letters: list[Any],
    workflows: Mapping[str, str],
    families: Mapping[str, Family],
) -> list[Any]:
    """The letters of which new runs are to be made: of those of one workflow run the first, and none if it has a head
    that lives, which is an error only for whoever asked for that very letter. `workflows`: of those that are heads."""
    whole = {id_: families[id_].workflow_run_id or id_ for id_ in workflows if id_ in families}
    if not whole:
        return letters
    await connection.execute(SQL["go_on"], list(whole.values()))
    asked = [workflows[id_] for id_ in whole], list(whole.values())
    seen = {row["id"] for row in await connection.fetch(SQL["under_way"], who.tenant_id, *asked)}
    if seen and chosen.ids is not None:
        raise _under_way(min(seen))
    wanted = []
    for letter in letters:
        of = whole.get(letter["id"])
        if of is None or of not in seen:
            wanted.append(letter)
        if of is not None:
            seen.add(of)
    return wanted


def _under_way(workflow_run_id: str) -> Conflict:
    return Conflict(f"workflow run {workflow_run_id} is under way", code="under_way")


def _archived() -> Conflict:
    return Conflict("what became of this workflow run's jobs is archived: run the workflow anew", code="archived")


async def _families(connection: Connection, who: Identity, run_ids: Sequence[str]) -> dict[str, Family]:
    """That new runs go on with the workflow runs that these are of, and stand for the same instants."""
    rows = await connection.fetch(SQL["heads"], who.tenant_id, list(run_ids)) if run_ids else []
    return {row["id"]: Family(row["logical_at"], row["workflow_run_id"]) for row in rows}
