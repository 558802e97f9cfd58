"""workflows: what becomes of a workflow run between its claim and its end.

Its head is claimed like any run, by nobody in particular (`CONDUCTOR`). Then it is begun: a run for each node, in one
transaction, each of which knows whom it feeds (`shared.joins` does the rest as they end); stopped, if it is to stop;
and ended, when all of its nodes have. Whichever server comes first does each of these; the row says what is to be done.
"""

from __future__ import annotations

from typing import NamedTuple

from tocsin.flow.shared import noderuns
from tocsin.flow.shared.failed import Failed
from tocsin.flow.shared.joins import settle
from tocsin.flow.shared.noderuns import Part, ends_of, make, still_doomed, told
from tocsin.flow.shared.transitions import SQL as SHARED
from tocsin.flow.shared.transitions import Hint, Key, Stop, stops
from tocsin.model.graph import FULFILLED, UPSTREAM_FAILED, blame, to_run_again
from tocsin.model.workflow import workflow_of
from tocsin.store.db import Database, Row, Sql
from tocsin.wire import Finished, RunError, decode_job_spec

SQL = Sql(__file__, SHARED)
_MOST = 200  # heads at a time
_TIMED_OUT = "the workflow run took longer than it may"


class Head(NamedTuple):
    """A workflow run that wants something done: `begin`, `stop` or `end`."""

    key: Key
    what: str


class Done(NamedTuple):
    """What became claimable, who is to be told to stop, and whether a workflow run has come to its end."""

    hints: list[Hint]
    stops: list[Stop]
    heads: bool = False


NOTHING = Done([], [])


async def wanting(db: Database, failed: Failed) -> list[Head]:
    """Return workflow runs that need a step, some of each kind, without those that failed within the last minute."""
    rows = await db.fetch("vital", SQL["heads"], _MOST + len(failed))
    what = {Key(row[0], row[1]): row[2] for row in rows}
    return [Head(key, what[key]) for key in failed.without(what)]


# ── begin ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def begin(db: Database, head: Key) -> Done:
    """Make the runs of a workflow run's nodes, in one transaction: all of them, or those that are to be run again."""
    async with db.transaction("workflow_begin", "vital") as connection:
        row = await connection.fetchrow(SQL["lock_head"], *head)
        if row is None or row["pending_parents"] is not None:
            return NOTHING  # somebody else was first
        if row["is_second"]:
            await connection.execute(SQL["skip"], *head)
            return Done([], [])
        spec = workflow_of(decode_job_spec(row["spec"]))
        graph = spec.graph
        again = row["trigger"] in ("retry", "redrive")
        ends = await ends_of(connection, head.tenant_id, row["workflow_run_id"]) if again else {}
        over = row["state"] == "stopping"
        nodes = [] if over else to_run_again(graph, told(ends), row["only"])
        doomed = UPSTREAM_FAILED if over else still_doomed(graph, told(ends), nodes)
        await connection.execute(SQL["begun"], *head, len(nodes), row["version"], spec.timeout.delta, doomed)
        if not nodes:
            return Done([], [], heads=True)
        settled = await make(connection, head, row, spec, graph, ends, nodes)
    return Done(settled.hints, [], settled.heads)


# ── stop and end ─────────────────────────────────────────────────────────────────────────────────────────────────


async def stop(db: Database, head: Key) -> Done:
    """staged | ready | waiting → cancelled, running → stopping: all that lives of a workflow run, but for mapped nodes'
    own runs: those end with the last of their elements."""
    async with db.transaction("workflow_stop", "vital") as connection:
        row = await connection.fetchrow(SQL["head"], *head)
        if row is None or not (row["late"] or row["state"] == "stopping"):
            return NOTHING
        reason = _TIMED_OUT if row["late"] else row["stop_reason"]
        rows = await noderuns.stop(connection, Part(head.tenant_id, row["workflow_run_id"], head.id), reason)
        settled = await settle(connection, rows)
    return Done(settled.hints, stops(rows), settled.heads) if rows else NOTHING


async def ending(db: Database, head: Key) -> Finished | None:
    """How a workflow run ended whose nodes all have; None if somebody else was first."""
    async with db.transaction("workflow_why", "vital") as connection:
        row = await connection.fetchrow(SQL["head"], *head)
        if row is None or row["pending_parents"] != 0:
            return None
        if row["doomed"] == FULFILLED:
            return _finished(head, row, "succeeded")  # a cancel that came too late changes nothing
        if row["state"] == "stopping":
            return _finished(head, row, "cancelled")
        if row["late"]:
            return _finished(head, row, "timeout", RunError(class_="timeout", message=_TIMED_OUT))
        ends = await ends_of(connection, head.tenant_id, row["workflow_run_id"])
    return _finished(head, row, "failed", RunError(class_="workflow_failed", message=blame(told(ends))))


def _finished(head: Key, row: Row, outcome: str, error: RunError | None = None) -> Finished:
    return Finished(
        run_id=head.id,
        attempt=row["attempt"],
        fence=row["fence"],
        tenant=head.tenant_id,
        outcome=outcome,  # type: ignore[arg-type]
        ran_ms=row["ran_ms"],
        error=error,
    )
