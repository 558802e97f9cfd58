"""`app.testing()`: jobs in this process, on a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tocsin import App, Context, GiveUp, Retry
from tocsin.client.job import RunFailed
from tocsin.errors import InvalidInput

NOW = datetime(2026, 3, 6, 8, 0, tzinfo=UTC)  # a Friday


def new_app() -> tuple[App, list[Any]]:
    app = App("t")
    seen: list[Any] = []

    @app.job(cron="0 9 * * MON-FRI", retries=2, retry={"backoff": "fixed", "delay": "1m", "jitter": "none"})
    async def daily(ctx: Context, region: str = "us") -> dict[str, Any]:
        seen.append((ctx.scheduled_for, ctx.attempt, region))
        await asyncio.sleep(0)
        return {"region": region}

    @app.job(retries=3, retry={"backoff": "fixed", "delay": "10s", "jitter": "none"})
    def steps(ctx: Context, stop_at: int = 0) -> int:
        done: int = ctx.saved or 0
        ctx.log.info("from", step=done)
        ctx.progress(done / 10)
        ctx.checkpoint(done + 1)
        if done < stop_at:
            raise ConnectionError(f"at {done}")
        return done

    @app.job
    def chain(n: int) -> None:
        seen.append(n)
        if n:
            app.jobs["t.chain"].submit_in("1h", n - 1)

    @app.job
    def moody(how: str) -> Any:
        if how == "give up":
            raise GiveUp("no")
        if how == "later":
            raise Retry("busy", after="5m")
        return "x" * 2**23 if how == "huge" else object()

    return app, seen


def test_a_submission_runs_when_the_test_says_so() -> None:
    app, seen = new_app()
    with app.testing(NOW) as testing:
        run = app.jobs["t.daily"].submit(region="eu")
        assert (run.state, seen) == ("staged", [])
        with pytest.raises(RuntimeError, match="wait"):
            run.result  # noqa: B018
        assert [played.id for played in testing.run()] == [run.id]
        assert (run.state, run.result) == ("succeeded", {"region": "eu"})
        later = app.jobs["t.daily"].submit_at(NOW + timedelta(minutes=5))
        with pytest.raises(TimeoutError):
            later.wait()
        testing.advance(300)
        assert later.wait().result == {"region": "us"}


async def test_the_same_in_async_code() -> None:
    app, _ = new_app()
    with app.testing(NOW) as testing:
        run = await app.jobs["t.daily"].submit(region="eu")
        many = await app.jobs["t.steps"].submit_many([{"stop_at": 0}, {"stop_at": 0}])
        assert (await run.wait()).result == {"region": "eu"}
        assert [one.result for one in many] == [0, 0]
        assert len(await testing.advance_to(NOW + timedelta(hours=2))) == 1


def test_schedules_fire_as_the_clock_is_moved() -> None:
    app, seen = new_app()
    with app.testing("2026-03-06T08:00:00Z") as testing:
        testing.advance("30m")
        assert seen == [] and testing.next_run_at("t.daily") == NOW.replace(hour=9)
        testing.advance("5d")  # over a week-end
        assert [at.day for at, _, _ in seen] == [6, 9, 10]
        assert testing.now == NOW + timedelta(days=5, minutes=30)
        assert [run.document["trigger"] for run in testing.runs] == ["schedule"] * 3


def test_retries_come_at_their_time_and_find_the_checkpoint() -> None:
    app, _ = new_app()
    with app.testing(NOW) as testing:
        run = app.jobs["t.steps"].submit(stop_at=2)
        testing.run()
        assert (run.state, run.document["error"]["class"]) == ("staged", "ConnectionError")
        testing.advance(10)
        assert (run.state, run.document["attempt"]) == ("staged", 2)
        testing.advance(10)
        assert (run.state, run.result, run.document["attempt"]) == ("succeeded", 2, 3)
        assert run.document["progress"] == 0.2
        assert [text for _, text in testing.logs(run)] == ["from step=0", "from step=1", "from step=2"]
        dead = app.jobs["t.steps"].submit(stop_at=9)
        testing.advance("1m")
        assert (dead.state, dead.document["attempt"]) == ("dead", 4)
        with pytest.raises(RunFailed, match="dead, ConnectionError: at 3"):
            dead.result  # noqa: B018


def test_functions_say_how_their_run_goes_on() -> None:
    app, _ = new_app()
    moody = app.jobs["t.moody"]
    with app.testing(NOW) as testing:
        given_up, later, odd, huge, wrong = moody.submit_many(
            [{"how": "give up"}, {"how": "later"}, {"how": "odd"}, {"how": "huge"}, {"how": 3}]
        )
        testing.run()
        assert (given_up.state, given_up.document["attempt"]) == ("dead", 1)
        assert later.document["ready_at"] == "2026-03-06T08:05:00.000000Z"
        assert odd.document["error"]["class"] == "result"
        assert (huge.state, huge.document["error"]["class"]) == ("dead", "result_too_large")
        assert (wrong.state, wrong.document["error"]["class"]) == ("dead", "arguments")


def test_jobs_may_submit_jobs() -> None:
    app, seen = new_app()
    with app.testing(NOW.replace(hour=10)) as testing:
        app.jobs["t.chain"].submit(2)
        testing.advance("3h")
        assert seen == [2, 1, 0]


async def test_jobs_may_submit_jobs_in_async_code_too() -> None:
    app, seen = new_app()
    with app.testing(NOW.replace(hour=10)) as testing:
        await app.jobs["t.chain"].submit(1)
        await testing.advance("3h")
        assert seen == [1, 0]


def test_max_runs_and_jitter_hold() -> None:
    app = App("j")
    starts = []

    @app.job(every="1m", max_runs=3, jitter="30s")
    def tick(ctx: Context) -> None:
        starts.append(ctx.scheduled_for)

    with app.testing(NOW) as testing:
        testing.advance("1h")
        assert starts == [NOW + timedelta(minutes=n) for n in (1, 2, 3)]


def test_a_document_that_the_server_would_refuse_is_refused() -> None:
    app = App()
    app.job(cron="61 * * * *")(new_app)
    with pytest.raises(InvalidInput, match="cron"):
        app.testing(NOW)


def test_afterwards_the_app_speaks_to_its_server_again(monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = new_app()
    with app.testing():
        pass
    with pytest.raises(Exception, match="no server is known"):
        app.jobs["t.steps"].submit()
    with pytest.raises(TypeError, match="stop_ad"):
        app.jobs["t.steps"].submit(stop_ad=1)
