"""How a user's editor and type checker see the SDK; `test_types` has it checked. A line ending in `# wrong` must be."""

from __future__ import annotations

from typing import assert_type

from tocsin import App, Context
from tocsin.client.job import Run
from tocsin.client.workflow import WorkflowRun

app = App("reports")


@app.job
async def daily(ctx: Context, region: str = "us") -> dict[str, int]:
    return {"rows": len(region)}


@app.job(every="5m", retries=3)
def hourly(day: str) -> int:
    return len(day)


with app.workflow("nightly", cron="0 2 * * *") as nightly:
    daily >> [hourly, hourly.step("again", day="monday")]
    [daily, hourly] >> daily.step("last").on("failure")
    hourly.on("sometimes")  # wrong
    daily >> "hourly"  # wrong
app.workflow("hourly", daily >> hourly.map("daily.days", max=5), corn="0 2 * * *")  # wrong


async def main() -> None:
    assert_type(await nightly.submit(day="monday"), WorkflowRun)
    run = await daily.submit(region="eu")
    assert_type(run, Run[dict[str, int]])
    assert_type((await run.wait()).result, dict[str, int])
    assert_type([r.result for r in await hourly.submit_many([{"day": "monday"}])], list[int])
    daily.submit(regoin="eu")  # wrong
    daily.submit(3)  # wrong
    app.job(corn="0 9 * * *")  # wrong


def script() -> None:
    assert_type(hourly.submit("monday").wait(timeout=5).result, int)
    hourly.submit_in("10m", day="monday")
    hourly.submit_in("10m", day=3)  # wrong
    hourly.submit_at("2030-01-01T00:00:00Z")  # wrong
