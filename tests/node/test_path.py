"""The whole path in one process: submit, claim, report, history, through the HTTP API."""

from __future__ import annotations

from tests.conftest import Api


async def test_a_job_without_schedule_runs_once_and_is_completed(api: Api, worker_key: str) -> None:
    job = await api.post("/v1/jobs", {"name": "hello", "target": {"kind": "process", "command": ["true"]}})
    assert (job["state"], job["version"]) == ("active", 1)
    worker = Api(api.node, worker_key)
    me = await worker.post("/v1/worker/register", {"name": "w", "slots": 2, "targets": ["process"]})
    claimed = await worker.post(f"/v1/worker/{me['worker_id']}/claim", {"slots": 2, "wait": 30})
    [run] = claimed["runs"]
    assert run["spec"]["target"]["command"] == ["true"]
    done = {"run_id": run["run_id"], "attempt": run["attempt"], "fence": run["fence"], "outcome": "succeeded"}
    answer = await worker.post(f"/v1/worker/{me['worker_id']}/report", {"finished": [done]})
    assert answer["accepted"] == [[run["run_id"], run["fence"]]]
    assert (await api.get(f"/v1/runs/{run['run_id']}"))["state"] == "succeeded"
    assert (await api.get(f"/v1/jobs/{job['id']}"))["state"] == "completed"
