"""What the checker looks at: ledger lines and API documents as plain data, and how they are gathered over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from . import ledger

Document = dict[str, Any]


def instant(text: str) -> datetime:
    """An RFC 3339 time of the API."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


class Audit(NamedTuple):
    """The audit as the API shows it, oldest first, and what it says of its own chain."""

    rows: list[Document]
    verified: bool


@dataclass
class Evidence:
    """One round, as seen from outside."""

    client: list[Document]  # client ledger, intents and replies
    lines: list[Document]  # job ledger
    jobs: dict[str, Document | None]  # None: 404
    runs: list[Document]  # every run of those jobs, as listed
    attempts: dict[str, list[Document]]
    workers: list[Document]
    settled_by: datetime  # what was due by then must have ended
    later: list[Document] | None = None  # the runs once more, some time after
    tagged_jobs: list[str] | None = None
    key_limits: dict[str, int] = field(default_factory=dict)
    slack: timedelta = timedelta(seconds=15)
    logs: dict[str, str] = field(default_factory=dict)  # of winning attempts that wrote something, as `jobs.digest`
    audit: Audit | None = None  # None: the product does not show it

    @cached_property
    def _replies(self) -> dict[int, Document]:
        return {r["n"]: r for r in self.client if r["phase"] == "reply"}

    def acknowledged(self, op: str) -> dict[int, list[str]]:
        """The ids that each request of a kind was answered with, by request."""
        asked = (r["n"] for r in self.client if r["phase"] == "intent" and r["op"] == op)
        return {n: self._replies[n]["ids"] for n in asked if n in self._replies and self._replies[n]["status"] < 300}

    def reply_to(self, intent: Document) -> Document | None:
        """The final answer to a request, if there was one."""
        return self._replies.get(intent["n"])

    def unanswered(self) -> list[Document]:
        """Requests whose outcome nobody learned."""
        return [r for r in self.client if r["phase"] == "intent" and r["n"] not in self._replies]

    @cached_property
    def asked_runs(self) -> set[str]:
        """Runs that were asked for, rather than owed by a schedule."""
        return {i for ids in self.acknowledged("create_runs").values() for i in ids}

    def runs_of(self, job_id: str) -> list[Document]:
        return self._runs_by_job.get(job_id, [])

    @cached_property
    def _runs_by_job(self) -> dict[str, list[Document]]:
        out: dict[str, list[Document]] = {}
        for run in self.runs:
            out.setdefault(run["job_id"], []).append(run)
        return out

    def window_end(self, job_id: str) -> datetime:
        """Until when a job owes: its cancel retracts what nobody has claimed by then, hence the slack."""
        ends = [
            r["wall_us"]
            for r in self.client
            if r["phase"] == "intent" and r["op"] in ("cancel_job", "pause_job") and r.get("job_id") == job_id
        ]
        if not ends:
            return self.settled_by
        cancelled = datetime.fromtimestamp(min(ends) / 1_000_000, UTC) - self.slack
        return min(cancelled, self.settled_by)


class Target(NamedTuple):
    """Where to look, and how strictly."""

    url: str
    key: str
    tag: str | None = None
    apart: float | None = 3.0  # None: one snapshot, without I6
    settle: float = 30.0
    slack: float = 15.0
    key_limits: dict[str, int] = {}  # noqa: RUF012  a NamedTuple's default, never changed


async def collect(target: Target, client_ledgers: Iterable[str | Path], job_ledgers: Iterable[str | Path]) -> Evidence:
    """Read both ledgers, then ask the API about everything they name; twice, `apart` seconds from each other."""
    client = ledger.read(*client_ledgers)
    replies = {r["n"]: r for r in client if r["phase"] == "reply" and r["status"] < 300}
    creates = [r["n"] for r in client if r["phase"] == "intent" and r["op"] == "create_job"]
    job_ids = [i for n in creates if n in replies for i in replies[n]["ids"]]
    headers = {"authorization": f"Bearer {target.key}"}
    async with httpx.AsyncClient(base_url=target.url, headers=headers, timeout=30) as http:
        api = _Api(http)
        taken_at = datetime.now(UTC)
        tagged = {j["id"]: j async for j in api.pages("/v1/jobs", tag=target.tag)} if target.tag else {}
        untold = [i for i in job_ids if i not in tagged]
        found = dict(zip(untold, await api.each("/v1/jobs/{}", untold), strict=True))
        evidence = Evidence(
            client=client,
            lines=[],
            jobs={i: tagged.get(i) or found.get(i) for i in job_ids},
            runs=await api.runs_of(job_ids, target.tag),
            attempts={},
            workers=[w async for w in api.pages("/v1/workers")],
            settled_by=taken_at - timedelta(seconds=target.settle),
            tagged_jobs=list(tagged) if target.tag else None,
            key_limits=dict(target.key_limits),
            slack=timedelta(seconds=target.slack),
        )
        flows = [r["n"] for r in client if r["phase"] == "intent" and r["op"] == "create_workflow"]
        evidence.jobs |= await api.nodes_of([i for n in flows if n in replies for i in replies[n]["ids"]])
        # After the first snapshot, so that whatever it calls succeeded has been noted; before the second, so that
        # whatever is noted is known to it.
        evidence.lines = ledger.read(*job_ledgers)
        evidence.attempts = await api.attempts(r["id"] for r in evidence.runs if _has_a_story(r))
        evidence.logs = await _whole_logs(api, _winners_that_wrote(evidence))
        evidence.audit = await api.audit()
        if target.apart is not None:
            await asyncio.sleep(target.apart)
            evidence.later = await api.runs_of(job_ids, target.tag)
    return evidence


def _winners_that_wrote(evidence: Evidence) -> dict[tuple[str, int], str]:
    """Which runs' logs are to be read, of which attempt, and what the jobs noted of them."""
    wrote = {(x["run_id"], x["attempt"], x["fence"]): x["wrote"] for x in evidence.lines if x.get("wrote")}
    won = ((r["id"], r["attempt"], r["fence"]) for r in evidence.runs if r["state"] == "succeeded")
    return {key[:2]: wrote[key] for key in won if key in wrote}


async def _whole_logs(api: _Api, wrote: dict[tuple[str, int], str]) -> dict[str, str]:
    """The logs, once they are as the jobs noted: lines may follow a result for a moment, but for no longer."""
    logs: dict[str, str] = {}
    missing = wrote
    patience = asyncio.get_running_loop().time() + _LINES_FOLLOW
    while missing:
        logs |= await api.logs(dict(missing.keys()))
        missing = {key: said for key, said in missing.items() if logs[key[0]] != said}
        if asyncio.get_running_loop().time() > patience:
            break
        await asyncio.sleep(0.1 if missing else 0)
    return logs


def _has_a_story(run: Document) -> bool:
    """A run that went right at once has nothing more to tell in its attempts."""
    return (run.get("attempt") or 0) > 1 or bool(run.get("failures")) or bool(run.get("losses"))


_LINES_FOLLOW = 15.0

# What the rules look at. A long round has half a million runs, and their whole documents would not fit into memory.
_KEPT = {
    *("id", "job_id", "state", "outcome", "reason", "blocked_by", "attempt", "failures", "losses", "max_attempts"),
    *("fence", "scheduled_for", "ready_at", "started_at", "finished_at", "trigger", "count", "worker"),
    "workflow_run_id",
}


def _slim(run: Document) -> Document:
    return {name: run[name] for name in run.keys() & _KEPT}


class _Api:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._turns = asyncio.Semaphore(8)  # more only cost the client

    async def get(self, path: str, **params: Any) -> Document | list[Any] | None:
        async with self._turns:
            reply = await self._http.get(path, params=params)
        if reply.status_code == 404:
            return None
        reply.raise_for_status()
        return reply.json()

    async def pages(self, path: str, **params: Any) -> AsyncIterator[Document]:
        cursor: dict[str, str] = {}
        while True:
            page = await self.get(path, limit=500, **params, **cursor)
            assert isinstance(page, dict), f"{path} is no list"
            for item in page["items"]:
                yield item
            if not page.get("next_cursor"):
                return
            cursor = {"cursor": page["next_cursor"]}

    async def each(self, path: str, ids: list[str]) -> list[Any]:
        return await asyncio.gather(*(self.get(path.format(i)) for i in ids))

    async def nodes_of(self, workflow_ids: list[str]) -> dict[str, Document | None]:
        """The jobs that workflows are made of, each with the names of those that it depends on."""
        found: dict[str, Document | None] = {}
        for flow in await self.each("/v1/workflows/{}", workflow_ids):
            jobs = await self.each("/v1/jobs/by-name/{}", [f"{flow['name']}.{node}" for node in flow["jobs"]])
            for job, spec in zip(jobs, flow["jobs"].values(), strict=True):
                wanted = [{"job": each} if isinstance(each, str) else each for each in spec.get("depends_on", ())]
                named = [each | {"job": f"{flow['name']}.{each['job']}"} for each in wanted]
                found[job["id"]] = job | {"depends_on": named}
        return found

    async def runs_of(self, job_ids: list[str], tag: str | None) -> list[Document]:
        """Runs have the tags of their jobs; without a tag each job is asked for."""
        if tag:
            return [_slim(run) async for run in self.pages("/v1/runs", tag=tag)]

        async def one(job_id: str) -> list[Document]:
            return [_slim(run) async for run in self.pages("/v1/runs", job=job_id)]

        return [run for runs in await asyncio.gather(*map(one, job_ids)) for run in runs]

    async def attempts(self, run_ids: Iterable[str]) -> dict[str, list[Document]]:
        ids = list(run_ids)
        answers = await self.each("/v1/runs/{}/attempts", ids)
        return {i: (a["items"] if isinstance(a, dict) else a or []) for i, a in zip(ids, answers, strict=True)}

    async def logs(self, attempts: dict[str, int]) -> dict[str, str]:
        """The whole log of one attempt of each run, as the digest that the job noted."""
        digests = await asyncio.gather(*(self._log(run_id, attempt) for run_id, attempt in attempts.items()))
        return dict(zip(attempts, digests, strict=True))

    async def _log(self, run_id: str, attempt: int) -> str:
        lines: list[str] = []
        after: int | None = 0
        while after is not None:
            page = await self.get(f"/v1/runs/{run_id}/logs", attempt=attempt, after=after)
            assert isinstance(page, dict), f"{run_id} has no log"
            lines += [line["text"] for line in page["items"]]
            after = page["next_after"]
        return ledger.digest(lines)

    async def audit(self) -> Audit | None:
        """All of it, once everything that was acknowledged is sealed; None if there is none to be read (422)."""
        patience = asyncio.get_running_loop().time() + _LINES_FOLLOW
        verified, cursor = True, dict[str, str]()
        while True:
            answer = await self._http.get("/v1/audit/verify", params=cursor)
            if answer.status_code in (404, 422):
                return None
            proof = answer.json() if answer.is_success else {"ok": False}
            verified = verified and proof["ok"]
            if proof.get("next_cursor"):
                cursor = {"cursor": proof["next_cursor"]}
            elif proof.get("unsealed") and asyncio.get_running_loop().time() < patience:
                await asyncio.sleep(0.1)
            else:
                break
        rows = [row async for row in self.pages("/v1/audit")]
        return Audit(rows[::-1], verified)
