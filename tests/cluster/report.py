"""What a round found, as figures (`chaos-report.json`) and as a page that needs nothing else (`chaos-report.html`)."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import platform
import subprocess
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .checker import RULES
from .cluster import LEASE, ROOT
from .evidence import Evidence, instant
from .ledger import made_at
from .nemesis import RECOVERY, Fault

if TYPE_CHECKING:
    from .round import Outcome

Figures = dict[str, Any]
LEAST_PER_SECOND = 300.0
MOST_AFTER_DATABASE = 5.0
_BARS_SHOWN = 240


def figures(outcome: Outcome) -> Figures:
    """Everything that the page shows."""
    e, (began, ended) = outcome.evidence, outcome.loaded
    states = Counter(run["state"] for run in e.runs)
    recovered = recoveries(e, outcome.faults)
    alone = spread([r.seconds for r in recovered if r.alone])
    back = first_starts(e, outcome.faults)
    per_second = round(sum(states.values()) / (ended - began), 1)
    return {
        "seed": outcome.plan.seed,
        "minutes": round((ended - began) / 60, 2),
        "began": _iso(began),
        "versions": versions(),
        "fleet": {"servers": outcome.plan.servers, "workers": outcome.plan.workers, "lease_seconds": LEASE},
        "load": {
            "jobs": len(e.jobs),
            "runs": len(e.runs),
            "runs_per_second": per_second,
            "states": dict(sorted(states.items())),
            "starts": sum(line["phase"] == "start" for line in e.lines),
            "starts_over_time": starts_over_time(e, began, ended),
            "requests": sum(r["phase"] == "reply" for r in e.client),
            "requests_repeated": outcome.repeats,
            "logs_compared": len(e.logs),
        },
        "lost": lost(e),
        "doubled": doubled(e),
        "attempts_lost": sum(run.get("losses") or 0 for run in e.runs),
        "reports_superseded": outcome.counted["tocsin_superseded_total"],
        "requests_duplicated": outcome.counted["requests duplicated"],
        "replies_cut": outcome.counted["replies cut"],
        "recovery_after_worker_kill_seconds": alone,
        "recovery_among_other_faults_seconds": spread([r.seconds for r in recovered if not r.alone]),
        "slowest_recoveries": [
            r._asdict() for wanted in (True, False) for r in slowest(r for r in recovered if r.alone is wanted)
        ],
        "first_start_after_database_restart_seconds": spread(back),
        "bars": [
            _bar("runs a second", per_second, LEAST_PER_SECOND, at_least=True),
            _bar("breaches", len(outcome.breaches), 0),
            _bar("recovery after kill -9 of a worker, p99, seconds", alone["p99"], RECOVERY),
            _bar("first new start after a database restart, most, seconds", spread(back)["most"], MOST_AFTER_DATABASE),
        ],
        "invariants": {
            name: {"says": _says(name), "breaches": sum(b.invariant == name for b in outcome.breaches)}
            for name in RULES
        },
        "not_exercised": [name for name, told in _told(e) if not told],
        "breaches": [str(b) for b in outcome.breaches[:500]],
        "faults": dict(sorted(Counter(f.kind for f in outcome.faults).items())),
        "timeline": [
            {
                "at": round(f.began - began, 2),
                "seconds": round(f.ended - f.began, 2),
                "kind": f.kind,
                "subject": f.subject,
                **f.note,
            }
            for f in outcome.faults
        ],
        "took_seconds": {what: round(seconds, 1) for what, seconds in outcome.took.items()},
    }


def _told(e: Evidence) -> Iterator[tuple[str, bool]]:
    """The invariants that only some rounds exercise, and whether this one did."""
    yield "I9", any(run.get("workflow_run_id") for run in e.runs)
    yield "I12", e.audit is not None


# ── figures out of the evidence ──────────────────────────────────────────────────────────────────────────────────────


class Recovery(NamedTuple):
    """A run that a killed worker had in hand."""

    run_id: str
    job_id: str
    seconds: float  # from the kill to its next start
    noticed: float  # … to the end of the lost attempt
    alone: bool  # nothing else was wrong
    meanwhile: list[str]


def recoveries(e: Evidence, faults: Sequence[Fault]) -> list[Recovery]:
    """As the API tells the attempts: which were lost with a killed worker, and when the next one started."""
    killed = {f.note["worker_id"]: f for f in faults if f.note.get("worker_id")}
    jobs = {run["id"]: run["job_id"] for run in e.runs}
    out = []
    for run_id, attempts in e.attempts.items():
        for lost_one, following in pairwise(sorted(attempts, key=lambda a: a["attempt"])):
            kill = killed.get(lost_one.get("worker"))
            if lost_one["outcome"] == "lost" and kill is not None and following.get("started_at"):
                at = instant(following["started_at"]).timestamp()
                others = [
                    f"{f.kind} ({f.subject})" for f in faults if f is not kill and f.began < at and f.ended > kill.began
                ]
                noticed = instant(lost_one["finished_at"]).timestamp()
                times = (round(since - kill.began, 2) for since in (at, noticed))
                out.append(Recovery(run_id, jobs.get(run_id, ""), *times, kill.note["alone"], others))
    return out


def slowest(recovered: Iterable[Recovery], most: int = 10) -> list[Recovery]:
    """Where to look first."""
    return sorted(recovered, key=lambda r: -r.seconds)[:most]


def first_starts(e: Evidence, faults: Iterable[Fault]) -> list[float]:
    """For each restart or fail-over of the database: from its taking connections to the first start of a run made
    since. One that was followed by another before anything could start is left out: there was nothing to start on."""
    outages = sorted((f.began, f.note["ready"]) for f in faults if "ready" in f.note)
    if not outages:
        return []
    starts = sorted(
        (made_at(line["run_id"]), line["wall_us"] / 1e6)
        for line in e.lines
        if line["phase"] == "start" and line["attempt"] == 1
    )
    out = []
    for (_, ready), (following, _) in pairwise([*outages, (float("inf"), 0.0)]):
        first = min((at for _, at in starts[bisect_left(starts, (ready, 0.0)) :][:1000]), default=float("inf"))
        if first < following:
            out.append(first - ready)
    return out


def lost(e: Evidence) -> int:
    """Acknowledged jobs and runs that are not there."""
    known = {run["id"] for run in e.runs}
    jobs = (i for ids in e.acknowledged("create_job").values() for i in ids)
    return sum(e.jobs.get(i) is None for i in jobs) + sum(i not in known for i in e.asked_runs)


def doubled(e: Evidence) -> int:
    """Attempts that started twice, and occurrences that became two runs."""
    starts = Counter((x["run_id"], x["attempt"]) for x in e.lines if x["phase"] == "start")
    due = Counter(
        (run["job_id"], run["scheduled_for"])
        for run in e.runs
        if run.get("trigger") == "schedule" and (run.get("count") or 1) == 1
    )
    return sum(n - 1 for counts in (starts, due) for n in counts.values())


def starts_over_time(e: Evidence, began: float, ended: float) -> dict[str, Any]:
    """Starts a second, in equal steps over the load."""
    step = max(1.0, (ended - began) / _BARS_SHOWN)
    counts = Counter(int((x["wall_us"] / 1e6 - began) / step) for x in e.lines if x["phase"] == "start")
    return {
        "step_seconds": round(step, 3),
        "per_second": [round(counts[n] / step, 1) for n in range(int((ended - began) / step) + 1)],
    }


def spread(values: list[float]) -> dict[str, Any]:
    """How many, and where the middle, the worst hundredth and the worst lie."""
    ordered = sorted(values)

    def at(share: float) -> float | None:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2) if ordered else None

    return {"count": len(ordered), "p50": at(0.5), "p99": at(0.99), "most": at(1.0)}


def _bar(what: str, measured: float | None, bar: float, *, at_least: bool = False) -> dict[str, Any]:
    held = measured is not None and (measured >= bar if at_least else measured <= bar)
    return {"what": what, "bar": f"{'≥' if at_least else '≤'} {bar:g}", "measured": measured, "held": held}


def _says(name: str) -> str:
    """The checker's own line on an invariant."""
    from . import checker

    lines = (line.split(maxsplit=1) for line in (checker.__doc__ or "").splitlines() if line.startswith("I"))
    return next((words[1] for words in lines if words[0] == name), "")


def versions() -> dict[str, str]:
    """What was measured, and on what."""
    from tocsin.store.embedded import find_installation

    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "tocsin": importlib.metadata.version("tocsin"),
        "commit": git.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "postgresql": find_installation().version,
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
    }


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def text(f: Figures) -> str:
    """A few lines for a terminal."""
    bars = [f"  {'held  ' if b['held'] else 'MISSED'} {b['what']}: {b['measured']} ({b['bar']})" for b in f["bars"]]
    return "\n".join([*f["breaches"], f"lost {f['lost']}, doubled {f['doubled']}", *bars])


def write(f: Figures, folder: Path) -> None:
    """Leave both files in the folder."""
    (folder / "chaos-report.json").write_text(json.dumps(f, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chaos-report.html").write_text(page(f), encoding="utf-8")


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1c2430;background:#fff}
h1{font-size:1.6rem;margin-bottom:0}h2{font-size:1.1rem;margin-top:2rem}p.sub{color:#5b6675;margin-top:.2rem}
table{border-collapse:collapse;width:100%}td,th{padding:.25rem .6rem;border-bottom:1px solid #e3e7ec;text-align:left}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.ok{color:#0a6e3c}.bad{color:#b3261e;font-weight:600}
svg{width:100%;height:auto;background:#f6f8fa}pre{white-space:pre-wrap;background:#fdf3f2;padding:.6rem}
.cards{display:flex;flex-wrap:wrap;gap:1rem}.cards div{flex:1 1 9rem;padding:.6rem .9rem;background:#f6f8fa}
.cards b{display:block;font-size:1.5rem}
@media(prefers-color-scheme:dark){body{background:#11161d;color:#dbe2ea}td,th{border-color:#2a323d}
.cards div,svg{background:#1a212b}pre{background:#2a1a1a}.ok{color:#5fd393}.bad{color:#ff8a80}p.sub{color:#93a0b0}}
"""


def page(f: Figures) -> str:
    """The whole page: no script, no other file."""
    good = not f["breaches"]
    verdict = "Every promise held" if good else f"{len(f['breaches'])} breaches of what we promise"
    built = ", ".join(f"{name} {version}" for name, version in f["versions"].items())
    fleet = "{servers} servers, {workers} workers, lease {lease_seconds:g} s".format(**f["fleet"])
    cards = {
        "runs": f["load"]["runs"],
        "runs a second": f["load"]["runs_per_second"],
        "faults": sum(f["faults"].values()),
        "lost": f["lost"],
        "doubled": f["doubled"],
    }
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Tocsin under faults: {verdict}</title><style>{_STYLE}</style>
<h1 class="{_colour_of(good)}">{verdict}</h1>
<p class="sub">{f["began"]}, {f["minutes"]} minutes, seed {f["seed"]}; {fleet}; {html.escape(built)}</p>
<div class="cards">{"".join(f"<div><b>{_text(n)}</b>{what}</div>" for what, n in cards.items())}</div>
<h2>Bars</h2>{_table("bar measured wanted held", _bars(f))}
<h2>Starts a second, and what was done to the fleet</h2>{_chart(f)}
<h2>Invariants</h2>{_table("invariant says breaches", _invariants(f))}
{"" if good else f"<pre>{html.escape(chr(10).join(f['breaches']))}</pre>"}
<h2>Recovery, in seconds</h2>{_table("after count p50 p99 most", _recovery(f))}
<h2>Load</h2>{_table("what how_many", _load(f))}
<h2>Faults by kind</h2>{_table("kind how_many", f["faults"].items())}
<h2>Faults in order</h2>{_table("second kind subject lasted", _timeline(f))}
</html>
"""


class _Marked(str):
    """Text that is good or bad news."""

    good: bool

    def __new__(cls, text: Any, good: bool) -> _Marked:
        made = super().__new__(cls, text)
        made.good = good
        return made


def _table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """Numbers stand to the right, what is marked in its colour."""

    def cell(value: Any) -> str:
        kind = _colour_of(value.good) if isinstance(value, _Marked) else "" if isinstance(value, str) else "n"
        return f'<td class="{kind}">{_text(value)}</td>'

    titles = "".join(f"<th>{name.replace('_', ' ')}" for name in head.split())
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{chr(10).join(map(cell, row))}</tr>' for row in rows)}</table>"


def _colour_of(good: bool) -> str:
    return "ok" if good else "bad"


def _text(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:,}".replace(",", "\u202f")
    return "–" if value is None else html.escape(str(value))


def _bars(f: Figures) -> Iterator[tuple[Any, ...]]:
    for bar in f["bars"]:
        yield bar["what"], bar["measured"], bar["bar"], _Marked("held" if bar["held"] else "missed", bar["held"])


def _invariants(f: Figures) -> Iterator[tuple[Any, ...]]:
    for name, told in f["invariants"].items():
        idle = " (nothing exercises it yet)" if name in f["not_exercised"] else ""
        yield name, told["says"] + idle, _Marked(told["breaches"], not told["breaches"])


def _recovery(f: Figures) -> Iterator[tuple[Any, ...]]:
    yield "kill -9 of a worker, alone: its run's next start", *f["recovery_after_worker_kill_seconds"].values()
    yield "the same among other faults", *f["recovery_among_other_faults_seconds"].values()
    yield (
        "database takes connections: first start of a new run",
        *f["first_start_after_database_restart_seconds"].values(),
    )


def _load(f: Figures) -> Iterator[tuple[Any, ...]]:
    load = f["load"]
    yield from [("jobs", load["jobs"]), *((f"runs {state}", n) for state, n in load["states"].items())]
    yield from [("starts noted by the jobs", load["starts"]), ("logs compared line by line", load["logs_compared"])]
    yield from [("writes answered", load["requests"]), ("requests repeated by the driver", load["requests_repeated"])]
    for name in ("attempts_lost", "reports_superseded", "requests_duplicated", "replies_cut"):
        yield name.replace("_", " "), f[name]


def _timeline(f: Figures) -> Iterator[tuple[Any, ...]]:
    for fault in f["timeline"]:
        yield fault["at"], fault["kind"], fault["subject"], fault["seconds"]


_COLOURS = {"kill": "#b3261e", "SIGSTOP": "#c77700", "SIGTERM": "#7a5cc0", "database": "#0b57d0", "clock": "#00796b"}
_NETWORK = "#6b7785"


def _chart(f: Figures) -> str:
    over = f["load"]["starts_over_time"]
    series, step = over["per_second"], over["step_seconds"]
    wide, high, most = 1000.0, 180.0, max([1.0, *series])
    second = wide / max(len(series), 1) / step
    points = " ".join(f"{n * step * second:.1f},{high - v / most * (high - 10):.1f}" for n, v in enumerate(series))
    marks = ""
    for n, fault in enumerate(f["timeline"]):
        width = max(fault["seconds"] * second, 2)
        place = f'x="{fault["at"] * second:.1f}" y="{high + 6 + 12 * (n % 4)}" width="{width:.1f}"'
        title = html.escape(f"{fault['kind']}: {fault['subject']}")
        marks += f'<rect {place} height="9" fill="{_colour(fault["kind"])}"><title>{title}</title></rect>'
    legend = " ".join(
        f'<span style="color:{c}">■</span> {what}' for what, c in [*_COLOURS.items(), ("network", _NETWORK)]
    )
    return (
        f'<svg viewBox="0 0 {wide:g} {high + 60:g}" role="img" aria-label="starts a second over time">'
        f'<polyline fill="none" stroke="currentColor" stroke-width="1.5" points="{points}"/>{marks}</svg>'
        f'<p class="sub">at most {most:g} starts a second; below them each fault for as long as it lasted: {legend}</p>'
    )


def _colour(kind: str) -> str:
    return next((c for word, c in _COLOURS.items() if kind.startswith(word)), _NETWORK)
