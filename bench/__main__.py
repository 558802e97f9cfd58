"""`python -m bench [names…]`: print the figures of this machine, and keep them in bench/results."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import (
    access,
    archive,
    audit,
    backfill,
    backlogs,
    burst,
    claim,
    days,
    detach,
    drain,
    edge,
    fair,
    floor,
    graphs,
    logs,
    noisy,
    output,
    pickup,
    schedules,
    sdk,
    spawn,
    storm,
    submit,
    xmin,
)
from bench.floor import Floor
from bench.stand import ROOT, Stand, say, stand

_RESULTS = Path(__file__).with_name("results")


@dataclass
class Report:
    """What was found: lines for people, a document for the results' file."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    floor: Floor | None = None

    def add(self, what: str, figure: str, more: str = "") -> None:
        """One line of the table."""
        self.lines.append((what, figure, more))

    def print(self) -> None:
        """The table."""
        widths = [max((len(line[column]) for line in self.lines), default=0) for column in (0, 1)]
        for what, figure, more in self.lines:
            print(f"{what:<{widths[0]}}  {figure:>{widths[1]}}  {more}".rstrip())


def main() -> None:
    """Measure what is asked for, on one stand."""
    options = _options()
    report = Report()
    with stand(options.patience) as made:
        _describe_machine(made, report)
        for name in options.names:
            say(f"── {name}")
            _BENCHMARKS[name](made, options, report)
    report.print()
    _keep(report)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(_BENCHMARKS)}; else all")
    parser.add_argument("--runs", type=int, default=50_000, help="drain: how many runs")
    parser.add_argument("--slots", type=int, default=2_000, help="drain: slots of each worker")
    parser.add_argument("--workers", type=int, default=1, help="drain: worker processes")
    parser.add_argument("--peer-python", default=sys.executable, help="burst: a Python that has the peers installed")
    parser.add_argument(
        "--long", action="store_true", help="schedules, archive: ten million, too, which takes long; output: 10 GB"
    )
    parser.add_argument("--megabytes", type=int, default=1000, help="logs: how much text")
    parser.add_argument("--hold", type=float, default=60, help="xmin: seconds the transaction stays open at least")
    parser.add_argument("--jobs", type=int, default=20_000, help="storm: jobs that call what is down")
    parser.add_argument("--storm", type=float, default=30, help="storm: seconds that it stays down once it was noticed")
    parser.add_argument("--small", action="store_true", help="backlogs: the sizes of `make test-slow`")
    parser.add_argument("--repeat", type=int, default=3, help="how often; the median counts")
    parser.add_argument("--patience", type=float, default=10, help="seconds to wait for a quiet machine, each time")
    options = parser.parse_args()
    if unknown := set(options.names) - set(_BENCHMARKS):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    options.names = options.names or list(_BENCHMARKS)
    return options


def _describe_machine(made: Stand, report: Report) -> None:
    conditions = asyncio.run(made.conditions())
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    report.document["machine"] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "commit": commit.stdout.strip(),
        "postgres": conditions,
    }
    report.add("machine", f"{os.cpu_count()} cores", f"load {os.getloadavg()[0]:.1f} before the start")
    report.add("PostgreSQL", conditions.pop("server_version"), ", ".join(f"{k} {v}" for k, v in conditions.items()))


def _floor(made: Stand, options: argparse.Namespace, report: Report) -> None:
    report.floor = floor.measure(made, repeat=options.repeat)
    report.document["floor"] = asdict(report.floor)
    for name, rates in report.floor.rates.items():
        micro = report.floor.postgres_us[name]
        by_clients = [
            f"{count} client{'s' * (count > 1)} {rates[count]:,.0f} ({micro[count]:.0f} µs)" for count in rates
        ]
        report.add(f"floor: {name}", f"{max(rates.values()):,.0f} rows/s", ", ".join(by_clients))


def _claim(made: Stand, options: argparse.Namespace, report: Report) -> None:
    if report.floor is None:
        _floor(made, options, report)
    assert report.floor is not None
    found = claim.measure(made, runs=options.runs, repeat=options.repeat)
    report.document["claim"] = [one.document() for rounds in found.values() for one in rounds]
    floors = report.floor.rates[floor.CLAIM]
    for limited in sorted({limited for limited, _ in found}):
        rates = {
            clients: statistics.median_low(one.per_second for one in rounds)
            for (share, clients), rounds in found.items()
            if share == limited
        }
        best = max(rates.values())
        each = ", ".join(f"{n} clients {rate:,.0f} ({rate / floors[n]:.2f})" for n, rate in rates.items())
        what = f"claim over {claim.TENANTS} tenants, {limited:.0%} under limits"
        report.add(what, f"{best:,.0f} runs/s", f"{best / max(floors.values()):.2f} of the floor's claim; {each}")


def _drain(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = drain.measure(made, runs=options.runs, slots=options.slots, workers=options.workers, repeat=options.repeat)
    report.document["drain"] = [one.document() for one in found]
    middle = drain.median(found)
    rates = ", ".join(f"{one.per_second:,.0f}" for one in found)
    report.add("drain", f"{middle.per_second:,.0f} runs/s", f"{_share(middle.per_second, report)} (all: {rates})")
    for name, micro in (("PostgreSQL", middle.postgres_us), ("server", middle.server_us), ("worker", middle.worker_us)):
        report.add(f"drain: CPU of {name}", f"{micro:.0f} µs/run")
    report.add("drain: enqueue in batches", f"{middle.enqueue_per_second:,.0f} runs/s")
    report.add("drain: noise", f"{middle.foreign_cores:.2f} cores", "used by others meanwhile")


def _spawn(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = spawn.measure(made, repeat=options.repeat)
    report.document["spawn"] = [one.document() for one in found]
    middle = drain.median(found)
    report.add("processes started", f"{middle.per_second:,.0f} runs/s", f"bar {spawn.BAR}; {drain.describe(middle)}")


def _output(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = output.measure(made, 10 if options.long else 1)
    report.document["output"] = found.document()
    figure = f"{found.peak_rss - found.idle_rss:+.0f} MB"
    more = f"of the worker's memory; {output.describe(found)}; {found.per_second:,.0f} MB/s"
    report.add(f"output of {found.gigabytes} GB", figure, more)


def _pickup(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = pickup.measure(made)
    report.document["pickup"] = [one.document() for one in found]
    for one in found:
        report.add(f"pick-up, {one.kind}", f"p50 {one.p50:.1f} ms", pickup.describe(one))


def _burst(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = burst.measure(made, repeat=options.repeat, peer_python=options.peer_python)
    report.document["burst"] = [one.document() for one in found]
    for one in found:
        report.add(f"burst of {one.runs:,}, {one.what}", f"p99 {one.p99:.1f} ms", burst.describe(one))


def _schedules(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = schedules.measure(made, long=options.long)
    report.document["schedules"] = [one.document() for one in found]
    for one in found:
        figure = f"{one.buffers:.1f} buffers a run"
        report.add(f"planning among {one.stored:,} schedules", figure, schedules.describe(one, found[0]))


def _sdk(made: Stand, options: argparse.Namespace, report: Report) -> None:
    overheads = sdk.overheads(made, runs=options.runs // 2, slots=options.slots, repeat=options.repeat)
    memories = sdk.memories(made)
    report.document["sdk"] = [one.document() for one in (*overheads, *memories)]
    for cost in overheads:
        micros = ", ".join(f"{one.worker_us:.1f}" for one in cost.drains)
        report.add(f"sdk: worker's CPU, {cost.what}", f"{cost.worker_us:.1f} µs/run", f"bar 40 (all: {micros})")
    for one in memories:
        bar = "; bar 120" if one.what == "async" else ""
        more = f"RSS of agent, guard and runner{bar} (PSS {one.pss:.0f} MB; idle {one.idle_rss:.0f} MB)"
        report.add(f"sdk: {one.calls:,} sleeping calls, {one.what}", f"{one.rss:.0f} MB", more)


def _submit(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = submit.measure(made)
    report.document["submit"] = [one.document() for one in found]
    for one in found:
        cost = f"CPU of PostgreSQL {one.postgres_us:.0f}, server {one.server_us:.0f} µs a request"
        report.add(one.what, f"{one.per_second:,.0f}/s", f"p50 {one.p50:.1f} ms, p99 {one.p99:.1f} ms; {cost}")


def _edge(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = edge.measure(made)
    report.document["edge"] = found.document()
    told = f"p50 {found.flooded_p50:.1f} ms, alone p50 {found.alone_p50:.1f}, p99 {found.alone_p99:.1f} ms"
    report.add("submit beside a key at 10× its rate", f"p99 {found.flooded_p99:.1f} ms", f"bar: 2× alone; {told}")
    share = f"{found.refused:,} of {found.asked:,} were refused"
    report.add("server's CPU of a flood, a request", f"{found.flood_us:.0f} µs", share)
    share = f"{found.worker_refused:,} of {found.worker_asked:,} were refused"
    report.add("a flood of no worker where workers call", f"{found.worker_refused / found.worker_asked:.0%}", share)


def _audit(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = audit.measure(made, repeat=options.repeat)
    report.document["audit"] = found.document()
    report.add(
        "audit takes of the submit rate", f"{found.share:.1%}", f"bar {audit.BAR:.0%}; of the CPU {found.cpu_share:.1%}"
    )
    for one in (*found.audited, *found.silent):
        cost = f"CPU of PostgreSQL {one.postgres_us:.0f}, server {one.server_us:.0f} µs a request"
        report.add(one.what, f"{one.per_second:,.0f}/s", f"p50 {one.p50:.1f} ms, p99 {one.p99:.1f} ms; {cost}")
    report.add("audit: not sealed at a round's end", f"{max(found.behind):,}", "records at most")


def _access(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = access.measure(made, repeat=options.repeat)
    report.document["access"] = found.document()
    for walls in found.walls:
        figure = f"{walls.share:.1%} of the rate"
        report.add(f"access: keys and walls, {walls.what}", figure, f"bar {access.BAR:.0%}; CPU {walls.cpu_share:.1%}")
        for one in (*walls.walled, *walls.bare):
            cost = f"CPU of PostgreSQL {one.postgres_us:.0f}, server {one.server_us:.0f} µs a request"
            report.add(f"access: {one.what}", f"{one.per_second:,.0f}/s", cost)
    for refusal in found.refusals:
        more = f"of CPU; bar {access.REFUSAL_MS:.0f}; p50 {refusal.p50:.1f} ms"
        report.add(f"access: refusal {refusal.status}, {refusal.what}", f"p99 {refusal.p99:.1f} ms", more)
    worst = max(found.revoked)
    more = f"the longest of {len(found.revoked)}, over two servers; bar {access.REVOKED_SECONDS:g} s"
    report.add("access: a revoked key opens", f"{worst * 1000:.0f} ms", more)


def _noisy(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = noisy.measure(made, repeat=options.repeat)
    report.document["noisy"] = found.document()
    what = f"noisy: submit p99 beside one at {noisy.TIMES} × its rate"
    report.add(what, f"{found.ratio:.2f}", f"of alone; bar {noisy.BAR:g}")
    for how, rounds in (("alone", found.alone), ("beside it", found.beside)):
        for p50, p99 in rounds:
            report.add(f"noisy: submit {how}", f"p99 {p99:.1f} ms", f"p50 {p50:.1f} ms")


def _archive(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = archive.measure(made, long=options.long)
    report.document["archive"] = found.document()
    rate = found.runs / found.archive_seconds
    report.add("archive: a page of one job's failures in March", f"{found.warm_ms:.0f} ms", f"bar {archive.BAR_MS:.0f}")
    more = f"the first {found.first_ms:.0f} ms; {found.runs:,} runs in {found.files} files"
    report.add("archive: slowest such page", f"{max(found.page_ms):.0f} ms", more)
    report.add("archive: bytes a run", f"{found.bytes / found.runs:.0f}", f"archived at {rate:,.0f} runs/s, proved")
    left = f"{found.hot_bytes_left / 1e6:.1f} MB"
    report.add("archive: history left in PostgreSQL", left, f"at most {found.hot_bytes_most / 1e6:.0f} MB on the way")


def _xmin(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = xmin.measure(made, runs=options.runs, slots=options.slots, hold=options.hold, repeat=options.repeat)
    report.document["xmin"] = [one.document() for one in found]
    rate, cpu = xmin.cost(found)
    report.add("xmin: a held horizon costs", f"{rate:.0%}", f"of the rate, and {cpu:+.0%} CPU of PostgreSQL a run")
    for one in found:
        report.add("xmin", f"{one.per_second:,.0f} runs/s", xmin.describe(one))


def _storm(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = storm.measure(made, jobs=options.jobs, seconds=options.storm)
    report.document["storm"] = found.document()
    for what, figure, more in storm.describe(found):
        report.add(f"storm: {what}", figure, more)


def _fair(made: Stand, options: argparse.Namespace, report: Report) -> None:
    shares, lone = fair.measure(made)
    report.document["fair"] = fair.document(shares, lone)
    for one in shares:
        report.add("fair: 20 tenants by weight", f"Jain {one.jain:.4f}", fair.describe(one))
    times = ", ".join(f"{waited:.0f}" for waited in lone.waited_ms)
    report.add(f"fair: one run behind {lone.queued:,}", f"{max(lone.waited_ms):.0f} ms", f"the longest (all: {times})")


def _backfill(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = backfill.measure(made, repeat=2 * options.repeat)  # a stretch that others disturb is to count little
    report.document["backfill"] = found.document()
    for kind, (live, named) in itertools.product(backfill.KINDS, backfill.LIVE.items()):
        p99 = f"p99 {found.p99(live, kind):.1f} ms, alone {found.p99(live, None):.1f} ms"
        what = f"backfill of a {kind}: {named} start so late beside it"
        report.add(what, f"{found.ratio(live, kind):.2f}", f"of alone: {p99}; bar {backfill.BAR:g}")
    for one in found.stretches:
        report.add("backfill", f"p99 {one.lags['schedule'].p99:.1f} ms", backfill.describe(one))


def _backlogs(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = backlogs.measure(made, backlogs.SMALL if options.small else backlogs.Sizes())
    report.document["backlogs"] = found.document()
    for what, figure, more in backlogs.describe(found):
        report.add(f"backlogs: {what}", figure, more)


def _graphs(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = graphs.measure(made, repeat=options.repeat)
    report.document["graphs"] = found.document()
    report.add(
        "graphs: from job to job in a chain", f"p50 {found.hop_ms:.1f} ms", f"of 1,000; bar {graphs.HOP_BAR_MS:g} ms"
    )
    for chain in found.chains:
        more = f"p99 {chain.p99:.1f} ms, {chain.seconds:.1f} s in all; others used {chain.foreign_cores:.2f} cores"
        report.add("graphs: chain", f"p50 {chain.p50:.1f} ms", more)
    bar = f"of 10,000 jobs; bar {graphs.FAN_BAR_SECONDS:g} s"
    report.add("graphs: out to many and in again", f"{found.fan_seconds:.2f} s", bar)
    for fan in found.fans:
        report.add("graphs: fan", f"{fan.seconds:.2f} s", f"others used {fan.foreign_cores:.2f} cores")


def _detach(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = detach.measure(made)
    report.document["detach"] = found.document()
    for when, doing in (("written", "while a day is written and proved"), ("waiting", "while its partition waits")):
        for what in detach.KINDS:
            p99 = f"p99 {getattr(found, when).p99(what):.0f} ms, alone {found.alone.p99(what):.0f} ms"
            told = f"of alone: {p99}; bar {detach.BAR:g}"
            report.add(f"detach: {what} {doing}", f"{found.ratio(when, what):.2f}", told)
    report.add("detach: noise", f"{found.foreign_cores:.2f} cores", "used by others meanwhile")


def _days(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = days.measure(made)
    report.document["days"] = found.document()
    more = f"of day {days.SETTLED} at most, up to day {days.DAYS}; bar {days.BAR:g}"
    report.add("days: the database afterwards", f"{found.growth:.3f}", more)
    for size in found.sizes:
        report.add(f"days: after day {size.day}", f"{size.all / 1e6:.1f} MB", days.describe(size))


def _share(rate: float, report: Report) -> str:
    return f"{rate / report.floor.both:.2f} of the floor" if report.floor else "floor not measured"


def _logs(made: Stand, options: argparse.Namespace, report: Report) -> None:
    found = logs.measure(made, options.megabytes)
    report.document["logs"] = found.document()
    mega, raw = 1e6, found.raw
    cpu = f"server {found.server_seconds / raw * 1e9:.0f}, PostgreSQL {found.postgres_seconds / raw * 1e9:.0f} ms/MB"
    report.add(
        "logs: in", f"{found.per_second / mega:.1f} MB/s", f"of {raw / mega:,.0f} MB; bar {logs.INGEST:g}; {cpu}"
    )
    for what, lying in (("as shipped", found.loose), ("compacted", found.compacted)):
        more = f"bar {logs.STORED:g}; {lying.segments:,} segments; PostgreSQL {lying.tables / raw:.4f} of raw"
        report.add(f"logs: {what}", f"{lying.stored / raw:.3f} of raw", f"{more}, bar {logs.GROWTH:g}")
        report.add(f"logs: rare word, {what}", f"{lying.rare * 1000:.0f} ms", f"bar {logs.RARE * 1000:.0f}")
    report.add("logs: compacting", f"{found.compacted_per_second / mega:.1f} MB/s")
    report.add("logs: behind, p95", f"{found.tail_p95 * 1000:.0f} ms", f"50 followers; bar {logs.TAIL * 1000:.0f}")


_BENCHMARKS: dict[str, Callable[[Stand, argparse.Namespace, Report], None]] = {
    "floor": _floor,
    "claim": _claim,
    "pickup": _pickup,
    "burst": _burst,
    "schedules": _schedules,
    "drain": _drain,
    "spawn": _spawn,
    "output": _output,
    "sdk": _sdk,
    "submit": _submit,
    "audit": _audit,
    "noisy": _noisy,
    "archive": _archive,
    "logs": _logs,
    "xmin": _xmin,
    "fair": _fair,
    "backfill": _backfill,
    "graphs": _graphs,
    "storm": _storm,
    # Last: they leave servers behind, and take a while.
    "backlogs": _backlogs,
    "access": _access,
    "edge": _edge,
    "detach": _detach,
    "days": _days,
}


def _keep(report: Report) -> None:
    _RESULTS.mkdir(exist_ok=True)
    path = _RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(report.document, indent=1) + "\n")
    say(f"kept in {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
