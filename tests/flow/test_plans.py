"""Every statement of the path finds its rows by index, also when the planner believes the tables to be empty.

A queue is vacuumed while it is empty and filled a moment later; a plan made from such statistics once read the whole
queue for each batch. Here the catalogue is made to lie that way, and each statement's generic plan is read.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import pairwise

import asyncpg
import pytest

from tests.conftest import Cluster
from tocsin.flow import (
    backfill,
    calendars,
    circuits,
    claim,
    control,
    edit,
    events,
    explain,
    fill,
    fleet,
    history,
    note,
    occurrences,
    parents,
    plan,
    pools,
    reap,
    report,
    seal,
    submit,
    sweep,
    unfold,
    usage,
)
from tocsin.flow.shared import calendars as shared_calendars
from tocsin.flow.shared import circuits as shared_circuits
from tocsin.flow.shared import dependencies, joins, noderuns, specs, transitions
from tocsin.store.db import _ROLE, _SESSION

STEPS = (
    backfill,
    calendars,
    circuits,
    shared_calendars,
    shared_circuits,
    claim,
    control,
    edit,
    events,
    explain,
    fill,
    fleet,
    note,
    parents,
    plan,
    pools,
    reap,
    report,
    seal,
    submit,
    sweep,
    unfold,
    usage,
    joins,
    dependencies,
    noderuns,
    specs,
    transitions,
)
HOT = ("runs", "jobs", "triggers", "limits", "idempotency", "history", "events", "audit", "backfills")
SMALL = ("audit_sealer", "audit_heads", "lane_pass")  # one row, or one row per tenant
FRAGMENTS = {
    "record_ended",
    "complete_jobs",
    "slots",
    "open_share",
    "start",
    "room",
    "rate_room",
    "let_go",
    "unblocked",
    "unused",
    "coming",
    "beyond",
    "family",
    "part",
    "ended_with",
    "with_ends",
    "only_job",
    "only_state",
    "job_of_cursor",
    "unjudged",
    "may_take",
    "gap",
    "unchanged",
}
# They read the front of an index, or a bounded part of a table, on purpose.
MEANT = {
    **{"next_due": "triggers_next", "pools": "runs", "list": "workers", "due": "backfills_open"},
}


def statements() -> Iterator[tuple[str, str]]:
    for step in STEPS:
        for name, text in step.SQL.items():
            # The filters of a list are inserted when they are used: `test_lists.py` counts the pages that they read.
            if name not in FRAGMENTS and "$FILES" not in text and "$ONLY" not in text:
                yield f"{step.__name__.rpartition('.')[2]}.{name}", text


def whole_scans(plan_lines: list[str], name: str, leads: Mapping[str, str]) -> list[str]:
    """Nodes that read a hot table, or an index of one, from end to end: without a condition on the column that leads
    the index (the others only filter)."""
    found = []
    for i, line in enumerate(plan_lines):
        scan = re.search(r"(?:Seq Scan on|Index (?:Only )?Scan (?:Backward )?using (\w+) on) (\w+)", line)
        if scan is None or not scan[2].startswith(HOT) or scan[2] in SMALL:
            continue
        follows = plan_lines[i + 1] if i + 1 < len(plan_lines) else ""
        led = scan[1] and re.search(rf"Index Cond: .*\b{leads[scan[1]]}\b", follows)
        if not led and MEANT.get(name) not in (scan[1], scan[2]):
            found.append(line.strip())
    return found


@pytest.fixture
async def lying(cluster: Cluster) -> AsyncIterator[asyncpg.Connection]:
    """A connection of the engine to a database whose tables are believed to hold one row in many pages."""
    name = await cluster.clone()
    superuser = await asyncpg.connect(cluster.as_superuser(name))
    await superuser.execute(
        "update pg_class set relpages = 1500, reltuples = 1"
        " where relkind = 'r' and relnamespace = 'tocsin'::regnamespace"
    )
    await superuser.close()
    engine = await asyncpg.connect(cluster.url(name), server_settings=_SESSION | _ROLE["engine"])
    yield engine
    await engine.close()
    await cluster.drop(name)


async def test_no_statement_of_the_path_reads_a_whole_table(lying: asyncpg.Connection) -> None:
    turned, leads = {}, await leading_columns(lying)
    for name, text in statements():
        lines = [row[0] for row in await explained(lying, text)]
        if bad := whole_scans(lines, name.partition(".")[2], leads):
            turned[name] = bad
    assert not turned, "\n".join(f"{k}: {v}" for k, v in turned.items())


FILLED = """
    set session_replication_role = replica;
    insert into tocsin.dependencies (tenant_id, parent_id, child_id, wants, parents)
    select 1, gen_random_uuid(), '00000000-0000-7000-8000-000000000001', 's', 5000 from generate_series(1, 5000);
    analyze tocsin.dependencies;
"""


@pytest.mark.parametrize(
    "before", ["select", "vacuum analyze tocsin.dependencies", FILLED], ids=["lying", "empty", "filled"]
)
async def test_edges_are_found_by_their_parent_or_their_child(
    lying: asyncpg.Connection, cluster: Cluster, before: str
) -> None:
    """Of many thousand edges of a tenant just those: whatever the table was like when the plan was made."""
    superuser = await asyncpg.connect(cluster.as_superuser(await lying.fetchval("select current_database()")))
    await superuser.execute(before)
    await superuser.close()
    for step in (joins, dependencies, sweep, explain, control):
        for name, text in step.SQL.items():
            if name not in FRAGMENTS and re.search(r"(from|using) dependencies|dependencies [df]", text):
                lines = [row[0] for row in await explained(lying, text)]
                for line, condition in pairwise(lines):
                    if scan := re.search(r"(?:Seq|Index).* Scan (?:using dependencies_(\w+) )?on dependencies", line):
                        job = {"pkey": "parent_id", "child": "child_id"}.get(scan[1])
                        assert re.search(rf"Index Cond: .*ROW\({job}, tenant_id\)", condition), (name, line, condition)


async def leading_columns(connection: asyncpg.Connection) -> dict[str, str]:
    rows = await connection.fetch(
        "select c.relname, a.attname from pg_index i join pg_class c on c.oid = i.indexrelid"
        " join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]"
    )
    return {row["relname"]: row["attname"] for row in rows}


async def explained(connection: asyncpg.Connection, text: str) -> list[asyncpg.Record]:
    # The simple protocol: a statement with parameters is explained without any values for them.
    if not re.search(r"\$\d", text):
        return await connection.fetch("explain " + text)
    types = await connection.prepare(text)
    kinds = ", ".join(f"{p.schema}.{p.name}" if p.kind != "array" else _array(p.name) for p in types.get_parameters())
    await connection.execute(f"prepare looked_at ({kinds}) as {text}")
    nulls = ", ".join("null" for _ in types.get_parameters())
    rows = await connection.fetch(f"explain execute looked_at ({nulls})" if nulls else "explain execute looked_at")
    await connection.execute("deallocate looked_at")
    return rows


def _array(name: str) -> str:
    return name if name.endswith("[]") else f"{name.removeprefix('_')}[]"


async def test_a_run_is_read_by_its_id(lying: asyncpg.Connection) -> None:
    """The condition on a job's id was once a filter over all jobs of the tenant."""
    await lying.execute("set role tocsin_app; set enable_hashjoin = on; set enable_mergejoin = on")
    lines = [row[0] for row in await explained(lying, history.SQL["get_live"])]
    assert not whole_scans(lines, "get_live", await leading_columns(lying)), "\n".join(lines)
    [looks_at_jobs] = [i for i, line in enumerate(lines) if " on jobs j" in line]
    assert re.search(r"Index Cond: .*\bid = ", lines[looks_at_jobs + 1])


async def test_records_of_a_schedule_are_found_by_their_instants_or_ids(lying: asyncpg.Connection) -> None:
    await partitioned(lying)
    leads = await leading_columns(lying)
    await lying.execute("set role tocsin_app; set enable_hashjoin = on; set enable_mergejoin = on")
    for name in ("records", "begun_before"):
        lines = [row[0] for row in await explained(lying, occurrences.SQL[name])]
        assert not whole_scans(lines, name, leads), "\n".join(lines)
        conditions = [line for line in lines if "Index Cond" in line]
        assert conditions and all(re.search(r"scheduled_for|first_for|run_id", line) for line in conditions), name


async def partitioned(connection: asyncpg.Connection) -> None:
    """A day of history: without one nothing of it is planned."""
    await connection.execute("reset role; set role tocsin_owner")
    await connection.execute("create table history_test partition of history for values from (minvalue) to (maxvalue)")


def test_a_turned_plan_is_noticed() -> None:
    turned = ["Nested Loop", "  ->  Index Scan using runs_pkey on runs r", "  ->  CTE Scan on held h"]
    leads = {"runs_pkey": "tenant_id"}
    assert whole_scans(turned, "finish", leads) == ["->  Index Scan using runs_pkey on runs r"]
    assert whole_scans([turned[1], "        Index Cond: (id = h.id)"], "finish", leads) != []
    assert whole_scans([turned[1], "        Index Cond: ((tenant_id = 1) AND (id = h.id))"], "finish", leads) == []
