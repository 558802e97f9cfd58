"""The checker must pass the truth and catch each seeded lie, by exactly the invariant it breaks."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests import PATIENCE

from . import jobs as job_module
from . import ledger
from .checker import RULES, check, most_at_once, owed_instants, summary
from .evidence import Audit, Evidence

T0 = datetime(2026, 6, 1, 12, 0, 0, 500_000, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MANUAL, EVERY, ONCE, PARENT, CHILD = "job-manual", "job-every", "job-once", "job-parent", "job-child"
WROTE = ledger.digest(["a line", "another"])


def iso(at: datetime) -> str:
    return at.isoformat(timespec="microseconds").replace("+00:00", "Z")


def us(at: datetime) -> int:
    return round((at - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1))


class Story:
    """Tells a truthful round: five jobs, a retry, a lost worker, a coalesced stretch, a skipped occurrence, a workflow
    of two, an audit and a log."""

    def __init__(self) -> None:
        self.client: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.attempts: dict[str, list[dict[str, Any]]] = {}

    def ask(self, op: str, ids: list[str], at: datetime, **more: Any) -> None:
        n = len(self.client) // 2 + 1
        key = f"key-{n}"
        self.client.append({"n": n, "phase": "intent", "op": op, "path": "/v1", "key": key, "wall_us": us(at)} | more)
        self.client.append({"n": n, "phase": "reply", "status": 201, "ids": ids, "wall_us": us(at + SECOND / 10)})

    def run(self, run_id: str, job_id: str, at: datetime, outcomes: list[str], **more: Any) -> None:
        """A run whose attempts follow each other a second apart, half a second long."""
        for number, outcome in enumerate(outcomes, 1):
            self._note(run_id, job_id, number, at + number * SECOND, outcome)
        state = {"succeeded": "succeeded", "failed": "dead"}.get((outcomes or ["none"])[-1], "skipped")
        end = at + (len(outcomes) + 0.5) * SECOND
        self.attempts[run_id] = [{"attempt": n, "fence": 1000 + n, "outcome": o} for n, o in enumerate(outcomes, 1)]
        document = {
            **{"id": run_id, "job_id": job_id, "state": state, "outcome": (outcomes or [None])[-1], "reason": None},
            **{"attempt": len(outcomes), "fence": 1000 + len(outcomes), "max_attempts": 4, "trigger": "schedule"},
            **{"failures": outcomes.count("failed"), "losses": outcomes.count("lost"), "blocked_by": None},
            **{"scheduled_for": iso(at), "ready_at": iso(at), "started_at": iso(end), "finished_at": iso(end)},
        }
        self.runs.append(document | more)

    def _note(self, run_id: str, job_id: str, attempt: int, at: datetime, outcome: str) -> None:
        who = {"run_id": run_id, "job_id": job_id, "attempt": attempt, "fence": 1000 + attempt, "key": "k", "pid": 1}
        for phase, instant in (("start", at), ("end", at + SECOND / 2)):
            ok = phase == "start" or outcome == "succeeded"
            if phase == "start" or outcome != "lost":
                self.lines.append(
                    who | {"phase": phase, "ok": ok, "wall_us": us(instant), "boottime_ns": us(instant) * 1000}
                )


def truth() -> Evidence:
    story = Story()
    for n, job_id in enumerate((MANUAL, EVERY, ONCE, PARENT, CHILD)):
        story.ask("create_job", [job_id], T0 - n * SECOND)
    story.ask("create_runs", ["m1", "m2", "m3"], T0, job_id=MANUAL, count=3)
    story.run("m1", MANUAL, T0, ["succeeded"], trigger="api")
    story.run("m2", MANUAL, T0 + 10 * SECOND, ["failed", "lost", "succeeded"], trigger="api")
    story.run("m3", MANUAL, T0 + 20 * SECOND, ["failed"] * 4, trigger="api")
    story.run("m4", MANUAL, T0 + 60 * SECOND, ["succeeded"], trigger="redrive")
    for k in (1, 2, 6):
        story.run(f"e{k}", EVERY, T0 + 30 * k * SECOND, ["succeeded"])
    story.run("e3", EVERY, T0 + 90 * SECOND, [], reason="skipped_overlap", count=1)
    story.run("e4", EVERY, T0 + 120 * SECOND, [], reason="coalesced", count=2)
    story.run("o1", ONCE, T0, ["succeeded"])
    story.run("p1", PARENT, T0, ["succeeded"], trigger="dependency", workflow_run_id="flow")
    story.run("c1", CHILD, T0 + SECOND, ["succeeded"], trigger="dependency", workflow_run_id="flow")
    next(x for x in story.lines if x["run_id"] == "e6" and x["phase"] == "end")["wrote"] = WROTE
    story.ask("cancel_job", [], T0 + 195 * SECOND, job_id=EVERY)
    every = {"every": "PT30S", "timezone": "UTC"}
    jobs: dict[str, dict[str, Any] | None] = {
        MANUAL: {"id": MANUAL, "created_at": iso(T0), "version": 1, "schedule": {"manual": True}, "max_concurrency": 1},
        EVERY: {"id": EVERY, "created_at": iso(T0), "version": 1, "schedule": every, "max_concurrency": None},
        ONCE: {"id": ONCE, "created_at": iso(T0), "version": 1, "schedule": None, "max_concurrency": None},
        PARENT: {"id": PARENT, "name": "extract", "created_at": iso(T0), "schedule": {"manual": True}},
        CHILD: {"id": CHILD, "created_at": iso(T0), "schedule": {"manual": True}, "depends_on": [{"job": "extract"}]},
    }
    audited = [("job.create", job_id) for job_id in jobs] + [("run.create", MANUAL), ("job.cancel", EVERY)]
    return Evidence(
        client=story.client,
        lines=story.lines,
        jobs=jobs,
        runs=story.runs,
        attempts=story.attempts,
        workers=[{"id": "w1", "slots": 4, "running": 0}, {"id": "w2", "slots": 4, "running": []}],
        settled_by=T0 + 300 * SECOND,
        later=copy.deepcopy(story.runs),
        tagged_jobs=list(jobs),
        key_limits={"k": 4},
        slack=15 * SECOND,
        logs={"e6": WROTE},
        audit=Audit([{"seq": n, "action": a, "target": f"job:{j}"} for n, (a, j) in enumerate(audited, 7)], True),
    )


def run(e: Evidence, run_id: str) -> dict[str, Any]:
    return next(r for r in e.runs if r["id"] == run_id)


def change(e: Evidence, run_id: str, **more: Any) -> None:
    """A lie told at both snapshots alike."""
    for r in (*e.runs, *(e.later or ())):
        if r["id"] == run_id:
            r.update(more)


def drop(e: Evidence, run_id: str) -> None:
    e.runs = [r for r in e.runs if r["id"] != run_id]
    e.later = [r for r in e.later or () if r["id"] != run_id]
    e.lines = [x for x in e.lines if x["run_id"] != run_id]


def twin(e: Evidence, run_id: str, **more: Any) -> None:
    """One more run like `run_id`, that did the same 45 seconds later."""
    e.runs.append(run(e, run_id) | more)
    e.later = copy.deepcopy(e.runs)
    moved = 45_000_000
    if "id" in more:
        e.lines += [
            x | {"run_id": more["id"], "wall_us": x["wall_us"] + moved, "boottime_ns": x["boottime_ns"] + moved * 1000}
            for x in e.lines
            if x["run_id"] == run_id
        ]


def line(e: Evidence, run_id: str, attempt: int, phase: str) -> dict[str, Any]:
    return next(x for x in e.lines if (x["run_id"], x["attempt"], x["phase"]) == (run_id, attempt, phase))


def schedule_of(e: Evidence, job_id: str) -> dict[str, Any]:
    job = e.jobs[job_id]
    assert job is not None
    return job["schedule"]  # type: ignore[no-any-return]


def audit_of(e: Evidence) -> list[dict[str, Any]]:
    assert e.audit is not None
    return e.audit.rows


def worker_holds(e: Evidence, running: Any) -> None:
    e.workers[0]["running"] = running


LIES: dict[str, list[tuple[str, Callable[[Evidence], Any]]]] = {
    "I1": [
        ("an acknowledged job is gone", lambda e: e.jobs.update({ONCE: None}) or drop(e, "o1")),
        ("an acknowledged run is gone", lambda e: drop(e, "m1")),
        ("an acknowledged run is listed twice", lambda e: twin(e, "m1")),
        ("two requests got the same job", lambda e: e.client[1].update(ids=[EVERY])),
        ("a request made its runs twice", lambda e: twin(e, "m1", id="m9")),
        ("a request made its job twice", lambda e: e.tagged_jobs and e.tagged_jobs.append("job-phantom")),
        ("something ran that never existed", lambda e: e.lines.append(e.lines[0] | {"run_id": "ghost"})),
    ],
    "I2": [
        ("an occurrence was silently missed", lambda e: drop(e, "e2")),
        ("an occurrence became two runs", lambda e: twin(e, "e2", id="e2b")),
        ("a reason counts too few", lambda e: change(e, "e4", count=1)),
        ("a reason counts too many", lambda e: change(e, "e4", count=3)),
        ("a run stands for an instant nobody owes", lambda e: change(e, "e2", scheduled_for=iso(T0 + 59 * SECOND))),
        ("more occurrences than max_runs allows", lambda e: schedule_of(e, EVERY).update(max_runs=5)),
        ("a one-time job never ran", lambda e: drop(e, "o1")),
        ("a one-time job ran twice", lambda e: twin(e, "o1", id="o2")),
    ],
    "I3": [
        ("a run is stuck ready", lambda e: change(e, "m3", state="ready")),
        ("a run is parked for ever", lambda e: change(e, "m3", state="waiting", blocked_by="limit")),
        ("a run is stopping for ever", lambda e: change(e, "e1", state="stopping")),
    ],
    "I4": [
        ("success without an end", lambda e: e.lines.remove(line(e, "m1", 1, "end"))),
        ("success of an attempt that was fenced off", lambda e: change(e, "m2", attempt=1, fence=1001)),
        ("success under another fence", lambda e: change(e, "m1", fence=999)),
        ("success of an attempt that failed", lambda e: line(e, "m1", 1, "end").update(ok=False)),
        ("success of a lost attempt", lambda e: change(e, "m2", attempt=2, fence=1002)),
    ],
    "I5": [
        ("one attempt started twice", lambda e: e.lines.append(line(e, "m1", 1, "start") | {"pid": 2})),
        (
            "a fence went down",
            lambda e: e.attempts["m2"][1].update(fence=900) or line(e, "m2", 2, "start").update(fence=900),
        ),
        ("a fence was used twice", lambda e: line(e, "m3", 2, "start").update(fence=1001)),
        (
            "a zombie began what was already somebody else's",
            lambda e: line(e, "m2", 1, "start").update(boottime_ns=us(T0 + 14 * SECOND) * 1000),
        ),
        ("the API tells another fence than the job saw", lambda e: e.attempts["m3"][0].update(fence=1000)),
    ],
    "I6": [
        ("a dead run came back", lambda e: e.later and e.later[2].update(state="succeeded")),
        ("an ended run was tried again", lambda e: e.later and e.later[0].update(attempt=2, fence=1002)),
        ("an ended run vanished", lambda e: e.later and e.later.pop(2)),
        ("an end was moved", lambda e: e.later and e.later[0].update(finished_at=iso(T0 + 9 * SECOND))),
    ],
    "I7": [
        ("one failure too many is told", lambda e: change(e, "m3", failures=5)),
        (
            "one failure too many is not told",
            lambda e: e.attempts["m3"].append({"attempt": 5, "fence": 1005, "outcome": "timeout"}),
        ),
        ("lost without end", lambda e: change(e, "m2", losses=4)),
    ],
    "I8": [
        (
            "two at once where one is allowed",
            lambda e: line(e, "m1", 1, "end").update(boottime_ns=us(T0 + 12 * SECOND) * 1000),
        ),
        ("a key's limit is passed", lambda e: e.key_limits.update(k=1)),
    ],
    "I9": [
        (
            "a child started before its parent's end",
            lambda e: line(e, "c1", 1, "start").update(boottime_ns=us(T0 + SECOND) * 1000),
        ),
        (
            "a child of a parent that failed ran",
            lambda e: change(e, "p1", state="dead"),
        ),
        ("a child ran without its parent", lambda e: change(e, "p1", workflow_run_id="another")),
    ],
    "I10": [
        ("a slot leaked", lambda e: worker_holds(e, 1)),
        ("a run is still held", lambda e: worker_holds(e, ["m1"])),
        ("a worker does not say", lambda e: worker_holds(e, None)),
    ],
    "I11": [
        ("a start one microsecond early", lambda e: line(e, "e1", 1, "start").update(wall_us=us(T0 + 30 * SECOND) - 1)),
        ("a retry before the run was due", lambda e: line(e, "m2", 3, "start").update(wall_us=us(T0 + 9 * SECOND))),
    ],
    "I12": [
        ("a write left no record", lambda e: audit_of(e).pop()),
        (
            "a write left two records",
            lambda e: audit_of(e).append(audit_of(e)[-1] | {"seq": audit_of(e)[-1]["seq"] + 1}),
        ),
        ("a record was taken out", lambda e: audit_of(e)[-1].update(seq=audit_of(e)[-1]["seq"] + 1)),
        ("a record was changed", lambda e: setattr(e, "audit", Audit(audit_of(e), False))),
        ("a record names another job", lambda e: audit_of(e)[0].update(target=f"job:{ONCE}")),
    ],
    "I13": [
        ("a line is missing", lambda e: e.logs.update(e6=ledger.digest(["a line"]))),
        ("a line is there twice", lambda e: e.logs.update(e6=ledger.digest(["a line", "a line", "another"]))),
        ("another attempt's line is there", lambda e: e.logs.update(e6=ledger.digest(["a line", "an other"]))),
        ("there is no log", lambda e: e.logs.clear()),
    ],
}


def test_the_truth_passes() -> None:
    assert [str(b) for b in check(truth())] == []


def test_every_invariant_has_a_lie() -> None:
    assert set(LIES) == set(RULES)


@pytest.mark.parametrize(
    ("invariant", "lie"), [pytest.param(i, f, id=f"{i} {name}") for i, lies in LIES.items() for name, f in lies]
)
def test_a_lie_is_caught_by_its_invariant(invariant: str, lie: Callable[[Evidence], Any]) -> None:
    evidence = truth()
    lie(evidence)
    found = check(evidence)
    assert {b.invariant for b in found} == {invariant}, [str(b) for b in found]


def test_what_is_not_shown_is_not_judged() -> None:
    evidence = truth()
    evidence.audit = None
    assert check(evidence) == []


def test_a_start_on_the_microsecond_is_not_early() -> None:
    evidence = truth()
    line(evidence, "e1", 1, "start").update(wall_us=us(T0 + 30 * SECOND))
    assert check(evidence) == []


def test_an_unanswered_request_may_have_been_done() -> None:
    evidence = truth()
    asked = {"n": 99, "phase": "intent", "op": "create_runs", "path": "", "key": "k", "wall_us": us(T0)}
    evidence.client.append(asked | {"job_id": MANUAL, "count": 1})
    twin(evidence, "m1", id="m9")
    assert check(evidence) == []


def test_what_is_due_after_the_settling_may_be_live() -> None:
    evidence = truth()
    late = iso(evidence.settled_by + SECOND)
    change(evidence, "m4", state="staged", scheduled_for=late, ready_at=late)
    evidence.lines = [x for x in evidence.lines if x["run_id"] != "m4"]
    assert check(evidence) == []


def test_a_killed_attempt_does_not_count_as_running_for_ever() -> None:
    lines = [x for x in truth().lines if x["run_id"] == "m2"]
    assert most_at_once(lines) == 1


def test_a_lost_attempt_that_wakes_to_note_its_end_holds_no_place() -> None:
    evidence = truth()
    woken = line(evidence, "m2", 2, "start") | {"phase": "end", "boottime_ns": us(T0 + 22 * SECOND) * 1000}
    evidence.lines.append(woken)
    assert check(evidence) == []


def test_what_was_begun_in_time_may_note_its_start_when_it_wakes() -> None:
    evidence = truth()
    start = line(evidence, "m2", 1, "start")
    born = start["boottime_ns"]
    start.update(boottime_ns=us(T0 + 14 * SECOND) * 1000)
    assert [b.invariant for b in check(evidence)] == ["I5"]
    start.update(born_ns=born)
    assert check(evidence) == []


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ({"every": "PT1M30S"}, 40),
        ({"every": "PT0.5S", "starting_at": iso(T0 + 3599 * SECOND)}, 3),
        ({"every": "PT1M", "max_runs": 7}, 7),
        ({"every": "PT1M", "until": iso(T0 + 600 * SECOND)}, 10),
        ({"cron": "*/5 * * * *", "timezone": "UTC"}, 12),
        ({"cron": "0 * * * *", "timezone": "UTC", "starting_at": "2026-06-01T13:00:00.000000Z"}, 1),
    ],
)
def test_what_a_schedule_owes_in_an_hour(schedule: dict[str, Any], count: int) -> None:
    job = {"created_at": iso(T0), "version": 1, "schedule": schedule}
    owed = owed_instants(job, T0 + 3600 * SECOND)
    assert isinstance(owed, list)
    assert len(owed) == count


def test_the_summary_says_what_was_looked_at() -> None:
    assert summary(truth()).startswith("5 jobs, 12 runs (1 dead, 2 skipped, 9 succeeded), ")


# ── the ledgers themselves ───────────────────────────────────────────────────────────────────────────────────────


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    first = ledger.Appender(path)
    first.write({"a": 1})
    with path.open("ab") as torn:
        torn.write(b'\n{"a": 2, "b')
    first.write({"a": 3})
    assert ledger.read(path) == [{"a": 1}, {"a": 3}]


def test_the_ledger_says_how_long_runs_waited(tmp_path: Path) -> None:
    book = ledger.Appender(tmp_path / "ledger", flush=False)
    for n in range(200):
        made = us(T0 + n * SECOND)
        line = {"run_id": f"{made // 1000:012x}-7000", "phase": "start", "attempt": 1, "wall_us": made + n * 1000}
        book.write(line | {"attempt": 1 + n % 2})
    lags = ledger.recent_lags(tmp_path / "ledger", size=1000)
    assert 1 < len(lags) < 20
    assert lags[-1] == pytest.approx(0.198, abs=0.002)


def test_a_client_ledger_goes_on_where_it_was_left(tmp_path: Path) -> None:
    for status in (201, 503):
        book = ledger.ClientLedger(tmp_path / "ledger")
        book.reply(book.intent("create_job", "/v1/jobs", "k"), status, ["j"])
        book.close()
    assert [(r["n"], r["phase"]) for r in ledger.read(tmp_path / "ledger")] == [
        (1, "intent"),
        (1, "reply"),
        (2, "intent"),
        (2, "reply"),
    ]


@pytest.mark.parametrize(("fail_attempts", "code"), [(0, 0), (2, 1), (1, 0)])
def test_the_job_program_notes_start_and_end(tmp_path: Path, fail_attempts: int, code: int) -> None:
    env = {
        **{"TOCSIN_RUN_ID": "r", "TOCSIN_JOB_ID": "j", "TOCSIN_ATTEMPT": "2", "TOCSIN_FENCE": str(2**40 + 2)},
        **{"TOCSIN_ARGS": json.dumps({"fail_attempts": fail_attempts, "key": "k"}), "PATH": os.environ["PATH"]},
    }
    program = [sys.executable, job_module.__file__, "--ledger", str(tmp_path / "ledger"), "--seconds", "0.01"]
    done = subprocess.run(program, env=env, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == code, done.stderr
    lines = ledger.read(tmp_path / "ledger")
    assert [x["phase"] for x in lines] == ["start", "end"]
    assert {(x["run_id"], x["attempt"], x["fence"], x["key"]) for x in lines} == {("r", 2, 2**40 + 2, "k")}
    assert lines[1]["ok"] == (code == 0)
    assert lines[1]["boottime_ns"] - lines[0]["boottime_ns"] >= 10_000_000


async def test_the_job_functions_note_the_same(tmp_path: Path) -> None:
    class Context:
        run_id, job_id, attempt, fence = "r", "j", 1, 7

    functions = job_module.app.functions
    path = str(tmp_path / "ledger")
    assert functions["trust.work"].call(Context(), ledger=path)["attempt"] == 1
    with pytest.raises(RuntimeError):
        await functions["trust.work_async"].call(Context(), ledger=path, fail_attempts=1)
    assert [x["phase"] for x in ledger.read(path)] == ["start", "end"] * 2
