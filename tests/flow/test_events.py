"""events: what is told, in which order, to whom, and what becomes of those who come late."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Api
from tests.flow.kit import Scene, end_of
from tocsin.flow import events
from tocsin.flow.events import NOWHERE, Change, EventId, Position, Reading
from tocsin.store.db import _SESSION

numbers = st.integers(0, 10**9 - 1)


@given(numbers, st.builds(Position, numbers, numbers, numbers))
def test_an_event_id_reads_as_it_was_written(mark: int, position: Position) -> None:
    assert EventId.parse(str(EventId(mark, position))) == (mark, position)


@pytest.mark.parametrize(
    "text", ["", "1", "1-2-3", "1-2-3-4-5", "a-1-2-3", "-1-2-3-4", "1-2-3-4\n", "١-1-1-1", "9" * 99]
)
def test_what_is_no_event_id_is_none(text: str) -> None:
    assert EventId.parse(text) is None


class Ear:
    """Somebody who listens to one tenant, reading by hand."""

    def __init__(self, scene: Scene, tenant_id: int) -> None:
        self.scene, self.tenant_id = scene, tenant_id
        self.place = EventId(0, NOWHERE)

    async def look(self) -> Reading:
        return (await events.read(self.scene.db, {self.tenant_id: self.place.position}))[self.tenant_id]

    async def open(self) -> None:
        await events.open_feeds(self.scene.db, [self.tenant_id])
        found = await self.look()
        assert found.mark is not None
        self.place = EventId(found.mark, found.upto)

    async def hear(self) -> list[Change]:
        """All that came since."""
        heard = []
        while True:
            found = await self.look()
            assert found.follows(self.place)
            heard += [change for change in found.changes if change.position > self.place.position]
            self.place = self.place._replace(position=found.upto)
            if not found.full:
                return heard


@pytest.fixture
async def ear(scene: Scene) -> Ear:
    ear = Ear(scene, (await scene.who()).tenant_id)
    await ear.open()
    return ear


@asynccontextmanager
async def unfinished(scene: Scene) -> AsyncIterator[Any]:
    """A transaction of the engine that has a number and is not committed yet."""
    connection = await asyncpg.connect(
        scene.node.settings.database_url, server_settings=_SESSION | {"role": "tocsin_engine"}
    )
    try:
        await connection.execute("begin")
        await connection.execute("select pg_current_xact_id()")
        yield connection
    finally:
        await connection.close()


def types(changes: list[Change]) -> list[str]:
    return [change.event.type for change in changes]


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_while_nobody_listens_nothing_is_written(scene: Scene) -> None:
    job = await scene.job(name="quiet")
    await scene.ask(job, 3)
    worker = await scene.employ(str(uuid.uuid4()))
    for run in await scene.take(worker=worker):
        await scene.end(worker, end_of(run))
    await scene.api.post(f"/v1/jobs/{job['id']}/pause")
    assert await scene.value("select count(*) from history") == 3
    assert await scene.value("select count(*) from events") == 0


async def test_a_run_is_told_from_its_making_to_its_end(scene: Scene, ear: Ear) -> None:
    worker = await scene.employ(str(uuid.uuid4()))
    job = await scene.job(retry={"max_attempts": 2, "backoff": "immediate"})
    [run_id] = await scene.ask(job)
    for outcome in ("failed", "succeeded"):
        [run] = await scene.take(worker=worker)
        await scene.end(worker, end_of(run, outcome, error="Boom" if outcome == "failed" else None))
        await scene.wake(run_id)
    heard = await ear.hear()
    assert types(heard)[:3] == ["job.created", "run.ready", "run.running"]
    assert sorted(types(heard)[3:5]) == ["run.retrying", "run.staged"]
    assert types(heard)[-2:] == ["run.running", "run.succeeded"]
    last: Any = heard[-1].event
    assert (last.id, last.job_id, last.state, last.attempt, last.outcome) == (
        run_id,
        job["id"],
        "succeeded",
        2,
        "succeeded",
    )
    retrying: Any = next(c.event for c in heard if c.event.type == "run.retrying")
    assert (retrying.state, retrying.attempt, retrying.outcome) == ("staged", 1, "failed")
    assert [c.position for c in heard] == sorted(c.position for c in heard)
    assert {c.job_id for c in heard} == {job["id"]}


async def test_every_end_and_every_block_is_told(scene: Scene, ear: Ear) -> None:
    worker = await scene.employ(str(uuid.uuid4()))
    job = await scene.job(retry={"max_attempts": 1}, max_concurrency=1)
    first, second = await scene.ask(job, 2)
    [run] = await scene.take(worker=worker)
    await scene.end(worker, end_of(run, "failed", error="Boom"))
    await scene.api.post(f"/v1/runs/{second if run['id'] == first else first}/cancel")
    once = await scene.job(schedule=None)
    [run] = await scene.take(worker=worker)
    await scene.end(worker, end_of(run))
    heard = await ear.hear()
    waiting: Any = next(c.event for c in heard if c.event.type == "run.waiting")
    assert waiting.blocked_by == "limit"
    assert {"run.waiting", "run.dead", "run.cancelled", "run.succeeded"} <= set(types(heard))
    done: Any = next(c.event for c in heard if c.event.type == "job.completed")
    assert (done.id, done.state) == (once["id"], "completed")


async def test_a_job_is_told_by_what_was_done_to_it(scene: Scene, ear: Ear) -> None:
    job = await scene.job(name="watched")
    path = f"/v1/jobs/{job['id']}"
    await scene.api.call("PATCH", path, json={"priority": 900})
    for verb in ("pause", "pause", "resume", "cancel"):
        await scene.api.post(f"{path}/{verb}")
    heard = await ear.hear()
    assert types(heard) == [f"job.{what}" for what in ("created", "updated", "paused", "resumed", "cancelled")]
    told: Any = heard[1].event
    assert (told.id, told.name, told.version, told.state) == (job["id"], "watched", 2, "active")


async def test_an_occurrence_staged_ahead_is_told_when_it_starts(scene: Scene, ear: Ear) -> None:
    job = await scene.job(schedule={"every": "PT1H"}, overlap="allow")
    [soon, due] = await scene.occur(job, -5, 0.001)
    await ear.hear()
    await scene.take()
    assert [(c.event.type, c.event.id) for c in await ear.hear()] == [("run.running", due)] and soon != due


async def test_a_large_statement_is_cut_into_rows_and_read_in_pages(
    scene: Scene, ear: Ear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PAGE", 2)
    job = await scene.job()
    ids = await scene.ask(job, 450)
    assert await scene.value("select max(json_array_length(changes::json)) from events") == 100
    heard = await ear.hear()
    assert [c.event.id for c in heard] == [job["id"], *ids]
    # Whoever saw any of them goes on exactly behind it.
    for nth in (0, 1, 99, 100, 101, 449):
        other = Ear(scene, ear.tenant_id)
        other.place = EventId(ear.place.mark, heard[nth].position)
        assert await other.hear() == heard[nth + 1 :]


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_committed_late_is_neither_lost_nor_out_of_order(scene: Scene, ear: Ear) -> None:
    job = await scene.job()
    [early] = await scene.ask(job)
    await ear.hear()
    async with unfinished(scene) as slow:
        await slow.execute("update runs set state = 'waiting', blocked_by = 'paused' where id = $1", early)
        [late] = await scene.ask(job)
        assert await ear.hear() == [], "the run that was made later waits for the older transaction"
        await slow.execute("commit")
    assert [(c.event.id, c.event.type) for c in await ear.hear()] == [(early, "run.waiting"), (late, "run.ready")]


async def test_a_feed_begins_when_everything_older_has_ended(scene: Scene) -> None:
    job = await scene.job()
    [run_id] = await scene.ask(job)
    ear = Ear(scene, (await scene.who()).tenant_id)
    async with unfinished(scene) as slow:
        await slow.execute("update runs set state = 'waiting', blocked_by = 'paused' where id = $1", run_id)
        await events.open_feeds(scene.db, [ear.tenant_id])
        assert (await ear.look()).mark is None, "this change was not written down, and a list does not show it yet"
        await slow.execute("commit")
    await ear.open()
    assert (await scene.run(run_id))["state"] == "waiting"
    assert await ear.hear() == []


async def test_what_is_rolled_back_is_not_told(scene: Scene, ear: Ear) -> None:
    job = await scene.job()
    [run_id] = await scene.ask(job)
    await ear.hear()
    async with unfinished(scene) as slow:
        await slow.execute("update runs set state = 'waiting', blocked_by = 'paused' where id = $1", run_id)
        await slow.execute("rollback")
    assert await ear.hear() == []


# ── walls ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tenants_hear_only_their_own(scene: Scene, ear: Ear) -> None:
    await scene.api.post("/v1/tenants", {"slug": "other"})
    other: Api = await scene.api.with_key("admin", "other")
    theirs = await scene.job(other)
    assert await scene.value("select count(*) from events") == 0, "nobody listens to that one"
    they = Ear(scene, (await scene.who("other")).tenant_id)
    await they.open()
    mine, more = await scene.job(), await scene.job(other)
    await other.post(f"/v1/jobs/{theirs['id']}/pause")
    assert [c.event.id for c in await ear.hear()] == [mine["id"]]
    assert [c.event.id for c in await they.hear()] == [more["id"], theirs["id"]]


async def test_the_role_of_calls_cannot_read_events(scene: Scene, ear: Ear) -> None:
    for table in ("events", "event_feeds"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with scene.db.tenant(ear.tenant_id, "test") as connection:
                await connection.fetch(f"select * from {table}")


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_comes_too_late_is_known(scene: Scene, ear: Ear) -> None:
    first = await scene.job()
    heard = await ear.hear()
    await scene.sql.execute("update events set at = at - interval '11 minutes'")
    second = await scene.job()
    await events.tidy(scene.db)
    ear.place = EventId(ear.place.mark, heard[-1].position)
    assert not (await ear.look()).follows(ear.place), "what stood behind it in the same transaction would be gone, too"
    left = await scene.rows("select changes from events")
    assert len(left) == 1 and second["id"] in left[0]["changes"] and first["id"] not in left[0]["changes"]


async def test_who_kept_up_is_not_hurt_by_tidying(scene: Scene, ear: Ear) -> None:
    await scene.job()
    await ear.hear()
    await scene.sql.execute("update events set at = at - interval '11 minutes'")
    await events.tidy(scene.db)
    assert await scene.value("select count(*) from events") == 0
    job = await scene.job()
    assert [c.event.id for c in await ear.hear()] == [job["id"]]


async def test_no_more_than_so_many_rows_are_kept(scene: Scene, ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEPT_ROWS", 3)
    jobs = [(await scene.job())["id"] for _ in range(5)]
    start = ear.place
    await events.tidy(scene.db)
    assert await scene.value("select count(*) from events") == 3
    assert not (await ear.look()).follows(start)
    since = (await ear.look()).since
    ear.place = EventId(start.mark, Position(since + 1))
    assert [c.event.id for c in await ear.hear()] == jobs[2:]


async def test_a_feed_that_is_not_renewed_is_closed_with_all_that_is_in_it(scene: Scene, ear: Ear) -> None:
    await scene.job()
    await scene.sql.execute("update event_feeds set open_until = now() - interval '1 second'")
    await events.tidy(scene.db)
    assert await scene.value("select count(*) from events") == 0
    assert not (await ear.look()).open
    await scene.job()
    assert await scene.value("select count(*) from events") == 0, "and nothing is written any more"
    before = ear.place
    await ear.open()
    assert not (await ear.look()).follows(before), "it is another feed: there was a gap"


async def test_feeds_are_closed_and_trimmed_some_at_a_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of one statement does not grow with the number of feeds or with their rows."""
    monkeypatch.setattr(events, "_FEEDS", 2)
    monkeypatch.setattr(events, "_MOST_TRIMMED", 4)
    await scene.sql.execute("insert into tenants (slug) select 'feed-' || i from generate_series(1, 10) as i")
    await scene.sql.execute(
        "insert into event_feeds (tenant_id, since, open_until)"
        " select id, 1, now() + case when id % 2 = 0 then interval '1 hour' else interval '-1 second' end"
        "  from tenants where slug like 'feed-%'"
    )
    await scene.sql.execute(
        "insert into events (tenant_id, xid, at, subject, changes)"
        " select tenant_id, 1 + i, now() - interval '11 minutes', 'run', '[]'"
        "  from event_feeds, generate_series(1, 3) as i"
    )
    await scene.sql.execute(
        "create table most (rows bigint); grant all on most to public;"
        "create function count_rows() returns trigger language plpgsql security definer set search_path = tocsin as $$"
        " begin insert into most select count(*) from gone; return null; end $$;"
        "create trigger count_rows after delete on events referencing old table as gone"
        " for each statement execute function count_rows()"
    )
    try:
        await events.tidy(scene.db)
        assert await scene.value("select max(rows) from most") == 6, "two feeds that close, with three rows each"
        assert await scene.value("select count(*) from events") == 0
        assert await scene.value("select count(*) from event_feeds") == 5
    finally:
        await scene.sql.execute("drop trigger count_rows on events; drop function count_rows; drop table most")


async def test_a_feed_with_the_numbers_of_another_cluster_is_closed(scene: Scene, ear: Ear) -> None:
    await scene.sql.execute("update event_feeds set since = since + 1000000")
    assert (await ear.look()).mark is None
    await events.tidy(scene.db)
    await ear.open()
    job = await scene.job()
    assert [c.event.id for c in await ear.hear()] == [job["id"]]


async def test_opening_again_keeps_what_is_open(scene: Scene, ear: Ear) -> None:
    before = await scene.row("select mark, since from event_feeds")
    await events.open_feeds(scene.db, [ear.tenant_id])
    assert await scene.row("select mark, since from event_feeds") == before
