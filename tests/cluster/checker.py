"""The outside checker: two ledgers and the HTTP API against the promises; it never looks into the database.

    python -m tests.cluster.checker --client-ledger F --job-ledger F --url U --key K

Exit 0: no breach. Exit 1: breaches, one a line. Exit 2: there was nothing to check, which proves nothing.

I1   every acknowledged create exists, once
I2   every occurrence owed in the window has exactly one run or counted reason
I3   every run that is due has ended
I4   `succeeded` was really done: the winning attempt noted its end under the winning fence
I5   no two starts share (run, attempt); fences rise with attempts; no attempt starts after a later one
I6   nothing changes after the end (two snapshots)
I7   failures ≤ max_attempts, losses ≤ 3
I8   limits hold over the intervals that the jobs themselves noted
I9   nothing starts before what it depends on has ended as it must
I10  no worker still holds a run
I11  nothing starts before it is due
I12  the audit has one record of each acknowledged write, without gaps, and its chain verifies
I13  the log of a run that succeeded is what its winning attempt wrote, line by line

`check` is a pure function of `Evidence`; `evidence.collect` gathers it. That is how `test_checker.py` can lie to it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count, islice, pairwise, takewhile
from typing import Any, NamedTuple

from .evidence import Evidence, Target, collect, instant

FINAL = ("succeeded", "dead", "cancelled", "expired", "skipped")
FAILED = ("failed", "timeout")
LOSS_BUDGET = 3
# Runs that come from another run, not from an owed occurrence or an acknowledged call.
DERIVED = ("retry", "redrive", "backfill", "dependency")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


class Breach(NamedTuple):
    invariant: str
    subject: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.what}"


def check(evidence: Evidence) -> list[Breach]:
    """Every breach that the evidence shows."""
    return [Breach(name, subject, what) for name, rule in RULES.items() for subject, what in rule(evidence)]


Found = Iterator[tuple[str, str]]


def i1_acknowledged_creates_exist_once(e: Evidence) -> Found:
    """Every 2xx create exists once, and nothing exists that nobody was promised."""
    jobs, runs = e.acknowledged("create_job"), e.acknowledged("create_runs")
    for thing, times in Counter(i for ids in (*jobs.values(), *runs.values()) for i in ids).items():
        if times > 1:
            yield thing, f"answered to {times} different requests"
    for job_id in (i for ids in jobs.values() for i in ids):
        if e.jobs.get(job_id) is None:
            yield job_id, "an acknowledged job does not exist"
    listed = Counter(run["id"] for run in e.runs)
    for run_id in (i for ids in runs.values() for i in ids):
        if listed[run_id] != 1:
            yield run_id, f"an acknowledged run is listed {listed[run_id]} times"
    yield from _phantoms(e, {i for ids in jobs.values() for i in ids}, {i for ids in runs.values() for i in ids})


def _phantoms(e: Evidence, jobs: set[str], runs: set[str]) -> Found:
    """What exists although no request was answered with it (an unanswered request may have made it)."""
    open_requests = e.unanswered()
    extra_jobs = sorted(set(e.tagged_jobs or ()) - jobs)
    if len(extra_jobs) > sum(r["op"] == "create_job" for r in open_requests):
        yield extra_jobs[0], f"{len(extra_jobs)} jobs carry this round's tag, but nobody was answered with them"
    room = Counter[str]()
    for request in open_requests:
        room[request.get("job_id") or ""] += request.get("count") or 0
    for job_id, job in e.jobs.items():
        if job is None or not (job.get("schedule") or {}).get("manual"):
            continue
        extra = [r["id"] for r in e.runs_of(job_id) if r["id"] not in runs and r.get("trigger") not in DERIVED]
        if len(extra) > room[job_id]:
            yield extra[0], f"{len(extra)} runs of {job_id} exist that no request was answered with"
    known = {run["id"] for run in (*e.runs, *(e.later or ()))}
    for run_id in sorted({line["run_id"] for line in e.lines} - known):
        yield run_id, "ran, but the API does not know it"


def i2_each_owed_occurrence_once(e: Evidence) -> Found:
    """Each occurrence owed in the window has exactly one row: a run, or a share in a counted reason."""
    for job_id, job in e.jobs.items():
        if job is None:
            continue
        rows = [r for r in e.runs_of(job_id) if r.get("trigger") not in DERIVED and r["id"] not in e.asked_runs]
        owed = owed_instants(job, e.window_end(job_id))
        if owed is None:
            continue
        if isinstance(owed, int):
            if len(rows) != owed:
                yield job_id, f"a one-time job has {len(rows)} runs"
            continue
        ended = len(owed) == (job.get("schedule") or {}).get("max_runs")
        yield from _compare(job_id, owed, rows, ended)


def _compare(job_id: str, owed: list[datetime], rows: list[dict[str, Any]], ended: bool) -> Found:
    """`ended`: nothing is owed after the last, either."""
    due = set(owed)
    single = Counter(instant(r["scheduled_for"]) for r in rows if (r.get("count") or 1) == 1)
    for at, times in single.items():
        if times > 1:
            yield job_id, f"the occurrence of {at.isoformat()} has {times} rows"
        if owed and owed[0] <= at and (ended or at <= owed[-1]) and at not in due:
            yield job_id, f"a run stands for {at.isoformat()}, which nothing owes"
    uncovered = [at for at in owed if at not in single]
    window = (owed[0], owed[-1]) if owed else (_EPOCH, _EPOCH)
    counted = sum(
        r["count"] for r in rows if (r.get("count") or 1) > 1 and window[0] <= instant(r["scheduled_for"]) <= window[1]
    )
    if len(uncovered) != counted:
        first = uncovered[0].isoformat() if uncovered else "none"
        yield job_id, f"{len(uncovered)} occurrences have no run (first {first}), {counted} are counted as not run"


def owed_instants(job: dict[str, Any], until: datetime) -> list[datetime] | int | None:
    """What a schedule owes up to `until`: instants; 1 for a one-time job; None where there is no saying.

    Deliberately not the product's own arithmetic: cron comes from cronsim, which knows UTC well.
    """
    schedule = job.get("schedule")
    if schedule is None or schedule.get("delay") or schedule.get("at"):
        return 1
    if int(job.get("version") or 1) != 1:
        return None
    instants = _instants(schedule, instant(job["created_at"]))
    if instants is None:
        return None
    end = min(until, instant(schedule["until"])) if schedule.get("until") else until
    return list(islice(takewhile(lambda at: at <= end, instants), schedule.get("max_runs")))


def _instants(schedule: dict[str, Any], made: datetime) -> Iterator[datetime] | None:
    """All that a schedule names after the job was made, without end."""
    starting = instant(schedule["starting_at"]) if schedule.get("starting_at") else None
    if schedule.get("every"):
        step = _seconds(schedule["every"])
        first = starting or made + step
        return (at for n in count() if (at := first + n * step) > made)
    if schedule.get("cron") and schedule.get("timezone", "UTC") == "UTC":
        from cronsim import CronSim

        return iter(CronSim(schedule["cron"], max(made, (starting or made) - _US)))
    return None


def _seconds(duration: str) -> timedelta:
    """`P1DT2H3M4.5S`, the one form that the API answers."""
    date, _, time = duration.removeprefix("P").partition("T")
    total, number = 0.0, ""
    for char in date + time:
        if char in "DHMS":
            total += float(number) * {"D": 86400, "H": 3600, "M": 60, "S": 1}[char]
            number = ""
        else:
            number += char
    return timedelta(seconds=total)


def i3_due_runs_end(e: Evidence) -> Found:
    for run in e.runs:
        due = instant(run.get("ready_at") or run["scheduled_for"])
        if run["state"] not in FINAL and due <= e.settled_by:
            yield run["id"], f"is still {run['state']}" + (f" ({run['blocked_by']})" if run.get("blocked_by") else "")


def i4_success_was_done(e: Evidence) -> Found:
    """Done by the attempt that is said to have won, and no later claim had fenced that one off."""
    ends = {(x["run_id"], x["attempt"], x["fence"]) for x in e.lines if x["phase"] == "end" and x["ok"]}
    highest: dict[str, int] = {}
    for line in e.lines:
        highest[line["run_id"]] = max(line["fence"], highest.get(line["run_id"], 0))
    for run in e.runs:
        if run["state"] != "succeeded":
            continue
        if (run["id"], run["attempt"], run["fence"]) not in ends:
            yield run["id"], f"succeeded, but attempt {run['attempt']} under fence {run['fence']} noted no good end"
        elif highest[run["id"]] > run["fence"]:
            yield run["id"], f"succeeded under fence {run['fence']}, but {highest[run['id']]} had been handed out"


def i5_starts_are_fenced(e: Evidence) -> Found:
    starts = Counter((x["run_id"], x["attempt"]) for x in e.lines if x["phase"] == "start")
    for (run_id, attempt), times in starts.items():
        if times > 1:
            yield run_id, f"attempt {attempt} started {times} times"
    yield from _late_starts(e)
    fences: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for line in e.lines:
        fences[line["run_id"]].add((line["attempt"], line["fence"]))
    for run_id, attempts in e.attempts.items():
        fences[run_id] |= {(a["attempt"], a["fence"]) for a in attempts if a.get("fence") is not None}
    for run_id, pairs in fences.items():
        ordered = sorted(pairs)
        for (attempt, fence), (later, higher) in pairwise(ordered):
            if attempt == later:
                yield run_id, f"attempt {attempt} had two fences, {fence} and {higher}"
            elif higher <= fence:
                yield run_id, f"attempt {later} had fence {higher}, not above {fence} of attempt {attempt}"


def _late_starts(e: Evidence) -> Found:
    """A worker begins nothing once its lease is over, so an attempt never starts after one that took its place. What
    was begun before may be frozen with its worker until then, and note its start when both wake."""

    def begun(line: dict[str, Any]) -> int:
        return line.get("born_ns", line["boottime_ns"])  # type: ignore[no-any-return]

    newest: dict[str, dict[str, Any]] = {}
    for line in sorted((x for x in e.lines if x["phase"] == "start"), key=begun):
        known = newest.setdefault(line["run_id"], line)
        if line["attempt"] < known["attempt"]:
            yield line["run_id"], f"attempt {line['attempt']} started after attempt {known['attempt']} had"
        else:
            newest[line["run_id"]] = line


_LASTING = ("state", "outcome", "reason", "attempt", "fence", "failures", "losses", "started_at", "finished_at")


def i6_the_end_is_final(e: Evidence) -> Found:
    if e.later is None:
        return
    after = {run["id"]: run for run in e.later}
    for run in e.runs:
        if run["state"] not in FINAL:
            continue
        now = after.get(run["id"])
        if now is None:
            yield run["id"], f"was {run['state']} and is gone"
            continue
        changed = [f"{k} {run.get(k)} → {now.get(k)}" for k in _LASTING if run.get(k) != now.get(k)]
        if changed:
            yield run["id"], f"changed after its end: {', '.join(changed)}"


def i7_tries_are_bounded(e: Evidence) -> Found:
    for run in e.runs:
        outcomes = [a.get("outcome") for a in e.attempts.get(run["id"], ())]
        failures = max(run.get("failures") or 0, sum(o in FAILED for o in outcomes))
        losses = max(run.get("losses") or 0, outcomes.count("lost"))
        if run.get("max_attempts") is not None and failures > run["max_attempts"]:
            yield run["id"], f"failed {failures} times of at most {run['max_attempts']}"
        if losses > LOSS_BUDGET:
            yield run["id"], f"was lost {losses} times of at most {LOSS_BUDGET}"


def i8_limits_hold(e: Evidence) -> Found:
    by_job, by_key = defaultdict(list), defaultdict(list)
    # A frozen attempt holds its place until its worker's lease is over (P7); when it wakes to note its end, it has
    # long been told as lost.
    lost = {(run_id, a["attempt"]) for run_id, told in e.attempts.items() for a in told if a["outcome"] == "lost"}
    for line in e.lines:
        if (line["run_id"], line["attempt"]) not in lost:
            by_job[line["job_id"]].append(line)
            by_key[line.get("key")].append(line)
    for job_id, job in e.jobs.items():
        limit = (job or {}).get("max_concurrency")
        if limit is not None and (most := most_at_once(by_job[job_id])) > limit:
            yield job_id, f"{most} ran at once, {limit} are allowed"
    for key, limit in e.key_limits.items():
        if (most := most_at_once(by_key[key])) > limit:
            yield f"key {key}", f"{most} ran at once, {limit} are allowed"


def most_at_once(lines: Iterable[dict[str, Any]]) -> int:
    """The most attempts that were between their start and their end at one instant (CLOCK_BOOTTIME of one host).

    An attempt that noted no end was killed, nobody knows when: it counts for nothing rather than for a false alarm.
    """
    spans: dict[tuple[str, int, int], dict[str, int]] = defaultdict(dict)
    for x in lines:
        spans[x["run_id"], x["attempt"], x["fence"]][x["phase"]] = x["boottime_ns"]
    edges = [edge for s in spans.values() if len(s) == 2 for edge in ((s["start"], 1), (s["end"], -1))]
    most = running = 0
    for _, step in sorted(edges):
        running += step
        most = max(most, running)
    return most


_ENDED_AS = {"success": ("succeeded",), "failure": ("dead",), "completion": FINAL}


def i9_parents_end_first(e: Evidence) -> Found:
    """Within a workflow run, no attempt of a child starts before the end of each parent that it wants."""
    named = {job["name"]: job["id"] for job in e.jobs.values() if job is not None and job.get("name")}
    parents = {(r["workflow_run_id"], r["job_id"]): r for r in e.runs if r.get("workflow_run_id")}
    ends = {(x["run_id"], x["fence"]): x["boottime_ns"] for x in e.lines if x["phase"] == "end"}
    starts: dict[str, int] = {}
    for line in e.lines:
        if line["phase"] == "start":
            starts[line["run_id"]] = min(line["boottime_ns"], starts.get(line["run_id"], line["boottime_ns"]))
    for (workflow, job_id), run in parents.items():
        for wanted in (e.jobs.get(job_id) or {}).get("depends_on") or ():
            parent = parents.get((workflow, named.get(wanted["job"], wanted["job"])))
            if run["id"] not in starts:
                continue
            if parent is None or parent["state"] not in _ENDED_AS[wanted.get("on", "success")]:
                yield run["id"], f"ran, but {wanted['job']} is {parent['state'] if parent else 'not there'}"
            elif ends.get((parent["id"], parent["fence"]), 0) > starts[run["id"]]:
                yield run["id"], f"started before the end of {wanted['job']}, on which it depends"


def i10_slots_come_back(e: Evidence) -> Found:
    for worker in e.workers:
        running = worker.get("running")
        if running is None:
            yield worker["id"], "does not say what it runs"
        elif number := running if isinstance(running, int) else len(running):
            yield worker["id"], f"still holds {number} runs"


def i11_nothing_early(e: Evidence) -> Found:
    due = {run["id"]: (instant(run["scheduled_for"]) - _EPOCH) // _US for run in e.runs}
    for line in e.lines:
        early = due.get(line["run_id"], 0) - line["wall_us"]
        if line["phase"] == "start" and early > 0:
            yield line["run_id"], f"attempt {line['attempt']} started {early} µs before it was due"


_AUDITED = {
    **{"create_job": "job.create", "create_runs": "run.create", "cancel_job": "job.cancel"},
    **{"create_workflow": "job.create", "run_workflow": "run.create"},
}


def i12_writes_are_audited(e: Evidence) -> Found:
    """One record of each acknowledged write (of an unanswered one there may be one), numbered without gaps."""
    if e.audit is None:
        return
    if not e.audit.verified:
        yield "audit", "its chain does not verify"
    for before, row in pairwise(e.audit.rows):
        if row["seq"] != before["seq"] + 1:
            yield "audit", f"record {row['seq']} follows {before['seq']}"
    told = Counter((row["action"], row["target"]) for row in e.audit.rows)
    wanted, possible = Counter[tuple[str, str]](), Counter[str]()
    for request in e.client:
        if request["phase"] == "intent" and (action := _AUDITED.get(request["op"])):
            reply = e.reply_to(request)
            if reply is None:
                possible[action] += 1
            elif reply["status"] < 300 and "job_id" in request:
                wanted[action, f"job:{request['job_id']}"] += 1
            elif reply["status"] < 300:  # two requests with one new job are the concern of I1
                wanted[action, f"job:{reply['ids'][0]}"] = 1
    for (action, target), times in wanted.items():
        if not times <= told[action, target] <= times + possible[action]:
            yield target, f"{action} was acknowledged {times} times and is recorded {told[action, target]} times"


def i13_logs_are_whole(e: Evidence) -> Found:
    wrote = {(x["run_id"], x["attempt"], x["fence"]): x["wrote"] for x in e.lines if x.get("wrote")}
    for run in e.runs:
        said = wrote.get((run["id"], run["attempt"], run["fence"]))
        if run["state"] == "succeeded" and said is not None and e.logs.get(run["id"]) != said:
            yield run["id"], f"attempt {run['attempt']} wrote {said}, the log is {e.logs.get(run['id'])} (lines:digest)"


RULES: dict[str, Callable[[Evidence], Found]] = {
    "I1": i1_acknowledged_creates_exist_once,
    "I2": i2_each_owed_occurrence_once,
    "I3": i3_due_runs_end,
    "I4": i4_success_was_done,
    "I5": i5_starts_are_fenced,
    "I6": i6_the_end_is_final,
    "I7": i7_tries_are_bounded,
    "I8": i8_limits_hold,
    "I9": i9_parents_end_first,
    "I10": i10_slots_come_back,
    "I11": i11_nothing_early,
    "I12": i12_writes_are_audited,
    "I13": i13_logs_are_whole,
}


def summary(e: Evidence) -> str:
    """What was looked at, so that nobody takes an empty round for a proof."""
    states = Counter(run["state"] for run in e.runs)
    counts = ", ".join(f"{n} {state}" for state, n in sorted(states.items())) or "none"
    starts = sum(line["phase"] == "start" for line in e.lines)
    lost = sum((run.get("losses") or 0) > 0 for run in e.runs)
    return (
        f"{len(e.jobs)} jobs, {len(e.runs)} runs ({counts}), {starts} starts noted, "
        f"{sum((run.get('attempt') or 0) > 1 for run in e.runs)} runs tried more than once, {lost} lost a worker, "
        f"{len(e.logs)} logs read"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="check what Tocsin promised against what happened")
    parser.add_argument("--client-ledger", action="append", required=True)
    parser.add_argument("--job-ledger", action="append", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--tag", help="k:v that every job of the round carries")
    parser.add_argument("--apart", type=float, default=3.0, help="seconds between the two snapshots (I6)")
    parser.add_argument("--settle", type=float, default=30.0, help="runs due this long ago must have ended (I3)")
    parser.add_argument("--slack", type=float, default=15.0, help="seconds before a cancel that owe nothing (I2)")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="KEY=N", help="concurrency of a ledger key (I8)"
    )
    given = parser.parse_args()
    limits = {k: int(n) for k, _, n in (text.rpartition("=") for text in given.limit)}
    target = Target(given.url, given.key, given.tag, given.apart, given.settle, given.slack, limits)
    evidence = asyncio.run(collect(target, given.client_ledger, given.job_ledger))
    breaches = check(evidence)
    for breach in breaches:
        print(breach)
    print(f"{summary(evidence)}: {len(breaches)} breaches", file=sys.stderr)
    if not evidence.jobs or not evidence.runs:
        return 1 if breaches else 2
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
