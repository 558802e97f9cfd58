"""A node whose loops stand still, and hands to make, take, end and move runs in time."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import asyncpg

from tests.conftest import Api
from tocsin.flow import claim, report, sweep
from tocsin.flow.claim import THE_BEGINNING, Share
from tocsin.flow.report import Ending, Reported
from tocsin.flow.shared.transitions import Key, NewRun, stage
from tocsin.model.access import Identity
from tocsin.model.ids import new_id
from tocsin.node.assemble import Node
from tocsin.store.db import Row
from tocsin.wire import Finished, RunError

PROCESS = {"kind": "process", "command": ["true"]}
HORIZON = timedelta(seconds=10)


class Scene:
    """One database, one still node, and a superuser's connection that row-level security does not bind."""

    def __init__(self, api: Api, sql: asyncpg.Connection) -> None:
        self.api = api
        self.sql = sql
        self.rng = random.Random(7)

    @property
    def node(self) -> Node:
        return self.api.node

    @property
    def db(self) -> Any:
        return self.api.node.db

    # ── the database itself ──────────────────────────────────────────────────────────────────────────────────────

    async def rows(self, statement: str, *args: Any) -> list[asyncpg.Record]:
        return await self.sql.fetch(statement, *args)  # type: ignore[no-any-return]

    async def row(self, statement: str, *args: Any) -> asyncpg.Record:
        [row] = await self.sql.fetch(statement, *args)
        return row

    async def value(self, statement: str, *args: Any) -> Any:
        return await self.sql.fetchval(statement, *args)

    async def now(self) -> datetime:
        return await self.value("select now()")  # type: ignore[no-any-return]

    async def down(self, by: timedelta) -> None:
        """Set the database as if no planner had completed a turn for this long."""
        await self.sql.execute(
            "insert into planner (turned_at) values (now() - $1::interval)"
            " on conflict (only_row) do update set turned_at = least(planner.turned_at, excluded.turned_at)",
            by,
        )

    async def who(self, tenant: str = "default", role: str = "platform") -> Identity:
        """Somebody of a tenant, for calling steps without HTTP."""
        tenant_id = await self.value("select id from tenants where slug = $1", tenant)
        return Identity(str(uuid.uuid4()), "test", role, tenant_id, tenant)

    # ── jobs and runs ────────────────────────────────────────────────────────────────────────────────────────────

    async def job(self, api: Api | None = None, **spec: Any) -> dict[str, Any]:
        """A job, by hand only unless `schedule` says otherwise."""
        body = {"target": PROCESS, "schedule": {"manual": True}} | spec
        return await (api or self.api).post("/v1/jobs", {k: v for k, v in body.items() if v is not None})  # type: ignore[no-any-return]

    async def ask(self, job: dict[str, Any], count: int = 1, **request: Any) -> list[str]:
        """Runs by hand; their ids, oldest first."""
        made = await self.api.post(f"/v1/jobs/{job['id']}/runs/batch", {"runs": [request] * count})
        return made["ids"]  # type: ignore[no-any-return]

    async def occur(self, job: dict[str, Any], *ago: float) -> list[str]:
        """Occurrences of a job's schedule, `ago` seconds before now (negative: still to come), as the planner
        stages them."""
        tenant_id = await self.value("select tenant_id from jobs where id = $1", job["id"])
        now = await self.now()
        instants = [now - timedelta(seconds=a) for a in ago]
        runs = [NewRun(tenant_id, new_id(at), job["id"], "schedule", at) for at in instants]
        async with self.db.transaction("test") as connection:
            rows = await stage(connection, runs)
        assert len(rows) == len(ago)
        return [run.id for run in runs]

    async def run(self, run_id: str) -> dict[str, Any]:
        return await self.api.get(f"/v1/runs/{run_id}")  # type: ignore[no-any-return]

    async def states(self, job: dict[str, Any]) -> list[str]:
        """The states of a job's live runs, oldest first."""
        return [r["state"] for r in await self.rows("select state from runs where job_id = $1 order by id", job["id"])]

    async def missed(self, job: dict[str, Any]) -> list[tuple[str, int]]:
        """Why and how often the job's occurrences did not run."""
        found = await self.rows(
            "select reason, count from history where job_id = $1 and reason is not null order by scheduled_for",
            job["id"],
        )
        return [tuple(row) for row in found]

    # ── claim and report ─────────────────────────────────────────────────────────────────────────────────────────

    async def shares(self, most: int) -> list[Share]:
        """Everything from everywhere, as a dispatcher would that knows no floors."""
        places = await self.rows(
            "select distinct lane_id, tenant_id from runs where state in ('ready', 'staged')"
            " and lane_id not in (select id from lanes where pool = 'workflows')"
        )
        return [Share(p["lane_id"], p["tenant_id"], most, THE_BEGINNING) for p in places]

    async def employ(self, worker: str, lease: float = 3600) -> str:
        """A worker with a lease: nothing is claimed for any other."""
        await self.db.fetch(
            "engine",
            "insert into workers (id, key_id, name, pool, slots, lease_until)"
            " values ($1, $1, 'test', 'default', 1000, now() + $2 * interval '1 second')"
            " on conflict (id) do update set lease_until = excluded.lease_until",
            worker,
            lease,
        )
        return worker

    async def take(self, slots: int = 100, worker: str | None = None) -> list[Row]:
        """Claim for a worker with `slots` free slots."""
        shares = await self.shares(slots)
        worker = await self.employ(worker or str(uuid.uuid4()))
        taken = await claim.take(self.db, shares, [worker] * slots) if shares else None
        return list(taken.rows) if taken else []

    async def taken(self, worker: str, slots: int = 100) -> list[tuple[str, int, int]]:
        """The same as (run, attempt, fence)."""
        return [(row["id"], row["attempt"], row["fence"]) for row in await self.take(slots, worker)]

    async def end(self, worker: str, *finished: Finished) -> Reported:
        """Report these ends."""
        return await report.report(self.db, self.node.specs, [Ending(worker, f) for f in finished], self.rng)

    async def lanes(self) -> list[int]:
        """Return all lanes."""
        return [row["id"] for row in await self.db.fetch("engine", "select id from lanes")]

    async def sweep_waiting(self) -> None:
        """Release waiting runs whose block has ended, as if workers were free in every lane."""
        await sweep.release_waiting(self.db, await self.lanes())

    async def replace(self) -> sweep.Replaced:
        """Stop the runs that waiting occurrences replace."""
        rows = await self.rows("select distinct tenant_id, job_id::text as id from runs")
        return await sweep.replace_earlier(self.db, [Key(row["tenant_id"], row["id"]) for row in rows])

    async def wake(self, *run_ids: str) -> None:
        """End the back-off of staged runs."""
        await self.sql.execute(
            "update runs set ready_at = now() where state = 'staged' and id = any($1::uuid[])", list(run_ids)
        )


def end_of(run: Any, outcome: str = "succeeded", error: str | None = None, **more: Any) -> Finished:
    """How a worker says that a claimed run ended; `run` is a claimed row, a key (run, attempt, fence) or a claim
    answer's run."""
    if isinstance(run, dict):
        key = run["run_id"], run["attempt"], run["fence"]
    else:
        key = run if isinstance(run, tuple) else (run["id"], run["attempt"], run["fence"])
    problem = RunError(class_=error, message="it broke") if error else None
    return Finished(
        run_id=str(key[0]),
        attempt=int(key[1]),
        fence=int(key[2]),
        outcome=outcome,  # type: ignore[arg-type]
        error=problem,
        **more,
    )


class WorkerHand:
    """A worker that does only what the test says, through the HTTP protocol."""

    def __init__(self, api: Api, worker_id: str) -> None:
        self.api = api
        self.id = worker_id

    @classmethod
    async def register(cls, node: Node, key: str, **body: Any) -> WorkerHand:
        api = Api(node, key)
        given = {"name": "hand", "slots": 100, "targets": ["process"]} | body
        return cls(api, (await api.post("/v1/worker/register", given))["worker_id"])

    async def claim(self, slots: int = 100, last_claim: int = 0, wait: float = 0.0, **kwargs: Any) -> Any:
        body = {"slots": slots, "last_claim": last_claim, "wait": wait}
        return await self.api.post(f"/v1/worker/{self.id}/claim", body, **kwargs)

    async def say(self, call: str, body: dict[str, Any]) -> Any:
        return await self.api.post(f"/v1/worker/{self.id}/{call}", body)

    async def report(self, expect: int | None = None, **body: Any) -> Any:
        return await self.api.post(f"/v1/worker/{self.id}/report", body, expect=expect)

    async def ship(self, *chunks: dict[str, Any], expect: int | None = None) -> Any:
        return await self.api.post(f"/v1/worker/{self.id}/logs", {"chunks": list(chunks)}, expect=expect)


def told(run: dict[str, Any], outcome: str = "succeeded", **more: Any) -> dict[str, Any]:
    """A claimed run's end as JSON."""
    return {k: run[k] for k in ("run_id", "attempt", "fence")} | {"outcome": outcome} | more


def keys(runs: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """[run, fence] of claimed runs."""
    return [[run["run_id"], run["fence"]] for run in runs]


def poll_opened(node: Node) -> asyncio.Event:
    """Set when the node's next long poll is open."""
    opened, open_poll = asyncio.Event(), node.dispatcher.open_poll

    def noticed(*args: Any, **kwargs: Any) -> Any:
        opened.set()
        return open_poll(*args, **kwargs)

    node.dispatcher.open_poll = noticed  # type: ignore[method-assign]
    return opened
