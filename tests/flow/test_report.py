"""report: how attempts end, what follows, and that nobody can end what is not his."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from tests.flow.kit import Scene, end_of
from tocsin.flow.report import ERROR_LIMIT, Returned, give_back
from tocsin.model.packed import MOST_RESULT
from tocsin.wire import RunError

W = str(uuid.uuid4())
FOREIGN = str(uuid.uuid4())


async def fail_until_dead(scene: Scene, run_id: str, **error: Any) -> list[float]:
    """Fail a run until it is dead; the back-offs in seconds."""
    waits = []
    while True:
        await scene.wake(run_id)
        [key] = await scene.taken(W)
        await scene.end(W, end_of(key, "failed", **error))
        row = await scene.rows(
            "select extract(epoch from ready_at - now())::float8 as s from runs where id = $1", run_id
        )
        if not row:
            return waits
        waits.append(row[0]["s"])


async def test_success_moves_the_run_to_history(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(tags={"team": "x"}), args={"n": 1})
    [key] = await scene.taken(W)
    done = await scene.end(W, end_of(key, held_ms=0, ran_ms=5, exit_code=0, result={"rows": 3}, usage={"cpu_ms": 1}))
    assert done.accepted == {(run_id, key[2])}
    assert await scene.value("select count(*) from runs") == 0
    run = await scene.run(run_id)
    assert (run["state"], run["outcome"], run["exit_code"], run["result"]) == ("succeeded", "succeeded", 0, {"rows": 3})
    assert (run["args"], run["tags"], run["worker"], run["attempt"]) == ({"n": 1}, {"team": "x"}, W, 1)
    assert run["started_at"] <= run["finished_at"] and run["start_lag_ms"] >= 0


async def test_times_are_kept_within_what_can_be_true(scene: Scene) -> None:
    ids = await scene.ask(await scene.job(), 3)
    keys = await scene.taken(W)
    await scene.sql.execute("update runs set claimed_at = now() - interval '10 s', ready_at = now() - interval '11 s'")
    claimed = await scene.value("select max(claimed_at) from runs")
    lies = ({"held_ms": -5e9, "ran_ms": 2000}, {"held_ms": 9e15, "ran_ms": 9e15}, {"held_ms": 1000, "ran_ms": -1})
    await scene.end(W, *(end_of(k, **lie) for k, lie in zip(keys, lies, strict=True)))
    rows = {str(r["run_id"]): r for r in await scene.rows("select run_id, started_at, finished_at, now() from history")}
    assert rows[ids[0]]["started_at"] == claimed
    assert rows[ids[0]]["finished_at"] == claimed + timedelta(seconds=2)
    assert all(claimed <= r["started_at"] <= r["finished_at"] <= r["now"] for r in rows.values())


# ── failure ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_failure_goes_back_to_staged_with_a_back_off_in_bounds_until_it_is_dead(scene: Scene) -> None:
    retry = {"max_attempts": 4, "delay": "PT10S", "multiplier": 3, "max_delay": "PT60S"}
    [run_id] = await scene.ask(await scene.job(retry=retry), args={"keep": "me"}, priority=700)
    waits = await fail_until_dead(scene, run_id, error="ValueError")
    assert len(waits) == 3
    assert all(-0.5 <= wait <= most for wait, most in zip(waits, (10, 30, 60), strict=True))
    run = await scene.run(run_id)
    assert (run["state"], run["attempt"], run["failures"], run["losses"]) == ("dead", 4, 4, 0)
    assert run["error"] == {"class": "ValueError", "message": "it broke"}
    attempts = (await scene.api.get(f"/v1/runs/{run_id}/attempts"))["items"]
    assert [(a["attempt"], a["outcome"]) for a in attempts] == [(n, "failed") for n in (1, 2, 3, 4)]
    fences = [a["fence"] for a in attempts]
    assert fences == sorted(set(fences))
    letter = await scene.row("select * from dead_letters")
    assert (str(letter["run_id"]), letter["args"], letter["priority"]) == (run_id, '{"keep":"me"}', 700)


async def test_a_fixed_back_off_without_jitter_is_exact_and_keeps_the_order(scene: Scene) -> None:
    retry = {"backoff": "fixed", "delay": "PT30S", "jitter": "none"}
    [run_id] = await scene.ask(await scene.job(retry=retry), priority=600)
    [key] = await scene.taken(W)
    done = await scene.end(W, end_of(key, "timeout"))
    row = await scene.row("select *, now() as asked from runs")
    assert row["state"] == "staged" and row["failures"] == 1 and row["worker_id"] is None
    assert timedelta(seconds=29) < row["ready_at"] - row["asked"] <= timedelta(seconds=30)
    assert row["ready_at"] - row["order_key"] == timedelta(milliseconds=100 * 20)
    assert [h.ready_at for h in done.hints] == [row["ready_at"]]
    assert (await scene.run(run_id))["scheduled_for"] is not None


@pytest.mark.parametrize(
    ("retry", "error", "state"),
    [
        ({"give_up_on": ["Fatal"]}, "Fatal", "dead"),
        ({"give_up_on": ["Fatal"]}, "Other", "staged"),
        ({"retry_on": ["Flaky"]}, "Flaky", "staged"),
        ({"retry_on": ["Flaky"]}, "Other", "dead"),
        ({}, "GiveUp", "dead"),
        ({"max_attempts": 1}, "Any", "dead"),
    ],
)
async def test_error_classes_decide_whether_to_try_again(scene: Scene, retry: Any, error: str, state: str) -> None:
    [run_id] = await scene.ask(await scene.job(retry=retry))
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed", error=error))
    assert (await scene.run(run_id))["state"] == state
    assert await scene.value("select count(*) from dead_letters") == (state == "dead")


@pytest.mark.parametrize(
    ("asked", "waits"),
    [({"retry_after": 90.0}, 90), ({"retry_after": float("nan")}, 30), ({"retry_after": -1.0}, 0), ({}, 30)],
)
async def test_what_failed_may_say_when_it_is_tried_again(scene: Scene, asked: Any, waits: float) -> None:
    await scene.ask(await scene.job(retry={"backoff": "fixed", "delay": "PT30S", "jitter": "none"}))
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed", error="Retry", **asked))
    row = await scene.row("select extract(epoch from ready_at - now())::float8 as s from runs where state = 'staged'")
    assert waits - 5 < row["s"] <= waits


async def test_what_failed_may_say_that_trying_again_is_useless(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job())
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed", error="mine.NoMoney", give_up=True))
    run = await scene.run(run_id)
    assert (run["state"], run["error"]["class"]) == ("dead", "mine.NoMoney")


async def test_a_one_time_job_is_completed_when_its_run_has_ended_for_good(scene: Scene) -> None:
    for outcome, rest in (("succeeded", None), ("failed", "staged")):
        job = await scene.job(schedule=None)
        [key] = await scene.taken(W)
        await scene.end(W, end_of(key, outcome))
        assert await scene.states(job) == ([rest] if rest else [])
        state = (await scene.api.get(f"/v1/jobs/{job['id']}"))["state"]
        assert state == ("active" if rest else "completed")
        await scene.sql.execute("delete from runs")
    dying = await scene.job(schedule=None, retry={"max_attempts": 1})
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed"))
    assert (await scene.api.get(f"/v1/jobs/{dying['id']}"))["state"] == "completed"


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("outcome", "state"),
    [("cancelled", "cancelled"), ("failed", "cancelled"), ("timeout", "cancelled"), ("succeeded", "succeeded")],
)
async def test_a_stopping_run_ends_as_cancelled_unless_it_had_succeeded(scene: Scene, outcome: str, state: str) -> None:
    [run_id] = await scene.ask(await scene.job())
    [key] = await scene.taken(W)
    assert (await scene.api.post(f"/v1/runs/{run_id}/cancel"))["state"] == "stopping"
    assert (await scene.end(W, end_of(key, outcome))).accepted == {(run_id, key[2])}
    run = await scene.run(run_id)
    assert (run["state"], run["outcome"]) == (state, outcome)
    assert await scene.value("select count(*) from dead_letters") == 0


# ── fences ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def everything(scene: Scene) -> list[Any]:
    return [
        await scene.rows("select * from runs order by id"),
        await scene.rows("select * from history order by run_id, attempt"),
        await scene.rows("select * from dead_letters"),
    ]


async def test_a_wrong_fence_or_worker_changes_nothing(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job())
    [(_, attempt, fence)] = await scene.taken(W)
    before = await everything(scene)
    for worker, key in (
        (W, (run_id, attempt, fence - 1)),
        (W, (run_id, attempt, fence + 1)),
        (W, (run_id, attempt, 0)),
        (FOREIGN, (run_id, attempt, fence)),
        (W, (str(uuid.uuid4()), attempt, fence)),
    ):
        for outcome in ("succeeded", "failed", "lost", "cancelled"):
            assert (await scene.end(worker, end_of(key, outcome))).accepted == set()
    assert await everything(scene) == before


async def test_an_exact_repeat_is_accepted_again_and_another_outcome_is_not(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job())
    [key] = await scene.taken(W)
    await scene.end(W, end_of(key, "failed"))
    after_first = await everything(scene)
    mine = {(run_id, key[2])}
    assert (await scene.end(W, end_of(key, "failed"))).accepted == mine
    assert (await scene.end(W, end_of(key, "succeeded"))).accepted == set()
    assert (await scene.end(FOREIGN, end_of(key, "failed"))).accepted == set()
    assert await everything(scene) == after_first
    # The same after the next attempt is under way, and after the end.
    await scene.wake(run_id)
    [again] = await scene.taken(W)
    assert (await scene.end(W, end_of(key, "failed"))).accepted == mine
    assert (await scene.end(W, end_of(key, "succeeded"))).accepted == set()
    await scene.end(W, end_of(again))
    assert (await scene.end(W, end_of(again))).accepted == {(run_id, again[2])}
    assert (await scene.run(run_id))["state"] == "succeeded"


async def test_a_run_handed_back_costs_neither_a_failure_nor_a_loss(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(retry={"max_attempts": 1}))
    for _ in range(5):
        [key] = await scene.taken(W)
        back = await give_back(scene.db, [Returned(W, run_id, key[2])])
        assert back.accepted == {(run_id, key[2])} and back.hints
        assert (await give_back(scene.db, [Returned(W, run_id, key[2])])).accepted == set()
        run = await scene.run(run_id)
        assert (run["state"], run["failures"], run["losses"]) == ("ready", 0, 0)
    assert (await scene.end(W, end_of(key))).accepted == set(), "its fence is not void, but it holds it no more"
    assert (await scene.api.get(f"/v1/runs/{run_id}/attempts"))["items"] == []


# ── one bad row ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_row_the_database_refuses_does_not_fail_its_neighbours(scene: Scene) -> None:
    ids = await scene.ask(await scene.job(), 9)
    keys = await scene.taken(W)
    ends = [end_of(k) for k in keys]
    ends[4] = end_of(keys[4], exit_code=2**40)  # no int4
    done = await scene.end(W, *ends)
    assert {run_id for run_id, _ in done.accepted} == set(ids)
    assert [(await scene.run(i))["state"] for i in ids] == ["succeeded"] * 9
    assert "could not be stored" in (await scene.run(keys[4][0]))["result"]["tocsin_note"]


async def test_characters_that_postgresql_refuses_are_escaped_and_stored(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(retry={"max_attempts": 1}))
    [key] = await scene.taken(W)
    ugly = end_of(key, "failed", result={"a\x00": "\x00b"})
    ugly.error = RunError(class_="Bad\x00Class", message="nul \x00 half \ud800 é 🎉")
    await scene.end(W, ugly)
    run = await scene.run(run_id)
    assert run["error"] == {"class": "Bad\\u0000Class", "message": "nul \\u0000 half \\ud800 é 🎉"}
    assert run["result"] == {"a\x00": "\x00b"}
    assert (await scene.api.get("/v1/dead-letters"))["items"][0]["error"] == run["error"]


async def test_what_is_too_large_is_cut_and_marked(scene: Scene) -> None:
    fits, large = await scene.ask(await scene.job(), 2)
    keys = await scene.taken(W)
    results = {fits: "ü" * (MOST_RESULT // 2 - 1), large: "ü" * (MOST_RESULT // 2)}
    ends = [end_of(k, result=results[k[0]]) for k in keys]
    ends[0].error = RunError(class_="C" * 10_000, message="m" * 100_000)
    await scene.end(W, *ends)
    assert (await scene.run(fits))["result"] == results[fits]
    cut = (await scene.run(large))["result"]
    assert cut["tocsin_truncated"] is True and cut["bytes"] == MOST_RESULT + 2
    error = (await scene.run(keys[0][0]))["error"]
    assert len(error["class"]) == 256 and len(error["message"]) == ERROR_LIMIT


async def test_a_thousand_mixed_ends_in_one_batch(scene: Scene) -> None:
    plain = await scene.job(retry={"max_attempts": 2})
    limited = await scene.job(max_concurrency=300)
    await scene.ask(plain, 700)
    await scene.ask(limited, 300)
    keys = await scene.taken(W, 1000)
    assert len(keys) == 1000
    outcomes = ("succeeded", "failed", "timeout", "lost", "cancelled")
    ends = [end_of(k, outcomes[i % 5], error="E" if i % 5 == 1 else None) for i, k in enumerate(keys)]
    stale = [end_of((k[0], k[1], k[2] + 1), "succeeded") for k in keys[:50]]
    done = await scene.end(W, *ends, *stale)
    assert done.accepted == {(k[0], k[2]) for k in keys}
    told = await scene.rows("select outcome, count(*) from history group by 1")
    assert {r["outcome"]: r["count"] for r in told} == dict.fromkeys(outcomes, 200)
    assert await scene.value("select count(*) from runs where state = 'staged'") == 600
    assert await scene.value("select count(*) from history where final") == 400
    assert len(msgspec.json.encode(await scene.api.get("/v1/runs?limit=500"))) > 100_000


async def test_a_job_tells_what_became_of_its_last_runs(scene: Scene) -> None:
    job = await scene.job(schedule={"manual": True}, retry={"max_attempts": 1})
    assert job["stats"] == {"ended": 0, "succeeded": 0, "dead": 0, "mean_ms": None, "longest_ms": None}
    ids = await scene.ask(job, 25)
    runs = await scene.take(25, W)
    await scene.end(W, *(end_of(r, "failed" if r["id"] == ids[-1] else "succeeded", ran_ms=5) for r in runs))
    told = await scene.api.get(f"/v1/jobs/{job['id']}")
    assert told["last_run"]["id"] == ids[-1] and told["last_run"]["state"] == "dead"
    stats = told["stats"]
    assert (stats["ended"], stats["succeeded"], stats["dead"]) == (20, 19, 1), "the last twenty"
    assert 0 <= stats["mean_ms"] <= stats["longest_ms"]
