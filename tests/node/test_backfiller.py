"""The backfiller's loop: as the runs of a backfill end, others follow, with nobody asking for them."""

from __future__ import annotations

from tests.cluster.cluster import until
from tests.flow.kit import Scene, WorkerHand, told


async def test_a_backfill_goes_on_by_itself_until_it_is_done(live: Scene, worker_key: str) -> None:
    job = await live.job(schedule={"cron": "0 0 * * *"})
    body = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-11T00:00:00Z", "max_concurrency": 3}
    backfill = await live.api.post(f"/v1/jobs/{job['id']}/backfill", body)
    hand = await WorkerHand.register(live.node, worker_key)
    seen: list[str] = []
    last = 0
    while len(seen) < 10:
        answer = await hand.claim(last_claim=last, wait=20)
        last = answer["claim_id"]
        assert 1 <= len(answer["runs"]) <= 3
        seen += [run["logical_at"] for run in answer["runs"]]
        await hand.report(last_claim=last, finished=[told(run) for run in answer["runs"]])
    assert sorted(seen) == [f"2026-01-{day:02}T00:00:00.000000Z" for day in range(1, 11)]

    async def completed() -> bool:
        return (await live.api.get(f"/v1/backfills/{backfill['id']}"))["state"] == "completed"

    await until("it is completed", completed)
