"""`tocsin report`: what became of runs, counted."""

from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.cli.output import Column, Document, print_json, print_table
from tocsin.cli.shared import Json, connect, noun
from tocsin.cli.text import local, milliseconds

if TYPE_CHECKING:
    from tocsin.model.reports import Kind

app = noun("Report what became of runs: how many, how long, how late, why not, and where.")

From = Annotated[str | None, typer.Option("--from", help="Runs made at this instant or later; a day ago unless given.")]
To = Annotated[str | None, typer.Option("--to", help="Runs made before this instant; now unless given.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=500, help="How many groups at most.", metavar="N")]
Csv = Annotated[bool, typer.Option("--csv", help="Print a table for spreadsheets.")]


def _group(item: Document) -> str:
    return str(item["label"] or item["key"])


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


RUNS = [
    Column("GROUP", _group, whole=True),
    Column("RUNS", lambda item: item["runs"]),
    Column("SUCCEEDED", lambda item: item["succeeded"]),
    Column("DEAD", lambda item: item["dead"]),
    Column("OTHER", lambda item: item["cancelled"] + item["expired"] + item["skipped"], spare=True),
    Column("SUCCESS", lambda item: _share(item["success_rate"])),
    Column("P50", lambda item: milliseconds(item["duration_p50_ms"])),
    Column("P95", lambda item: milliseconds(item["duration_p95_ms"])),
    Column("P99", lambda item: milliseconds(item["duration_p99_ms"]), spare=True),
    Column("LAG P50", lambda item: milliseconds(item["start_lag_p50_ms"]), spare=True),
    Column("LAG P99", lambda item: milliseconds(item["start_lag_p99_ms"])),
]
FAILURES = [
    Column("GROUP", _group),
    Column("FAILURES", lambda item: item["failures"]),
    Column("RUNS", lambda item: item["runs"]),
    Column("DEAD", lambda item: item["dead"]),
    Column("LAST", lambda item: local(item["last_at"]), spare=True),
    Column("LAST RUN", lambda item: item["last_run_id"], whole=True),
]
UTILISATION = [
    Column("GROUP", _group, whole=True),
    Column("ATTEMPTS", lambda item: item["attempts"]),
    Column("BUSY", lambda item: milliseconds(item["busy_seconds"] * 1000)),
    Column("USED", lambda item: _share(item["utilisation"])),
]


def _print(
    kind: "Kind",
    columns: list[Column],
    query: tuple[str | None, str | None, str | None, int],
    as_json: bool,
    as_csv: bool,
) -> None:
    from_, to, by, limit = query
    with connect() as client:
        found = client.get_report(kind, from_=from_, to=to, by=by, limit=limit)
    items = found["items"]
    if as_json:
        print_json(found)
        return
    if as_csv:
        from tocsin.model import tables

        typer.echo(tables.as_csv(list(items[0]) if items else ["key"], items), nl=False)
    else:
        print_table(items, columns)
    if not found["complete"]:
        typer.echo("there were more runs than a report reads: this is of the newest; ask for less time", err=True)


def _command(kind: "Kind", columns: list[Column], groups: str, words: str) -> None:
    @app.command(kind, help=words)
    def report(
        by: Annotated[str | None, typer.Option(help=groups, metavar="GROUP")] = None,
        from_: From = None,
        to: To = None,
        limit: Limit = 100,
        as_csv: Csv = False,
        as_json: Json = False,
    ) -> None:
        _print(kind, columns, (from_, to, by, limit), as_json, as_csv)


_command(
    "runs",
    RUNS,
    "total, day, hour or job.",
    "How many runs there were, how they ended, how long they took and how late they began.",
)
_command(
    "failures",
    FAILURES,
    "class, job, worker, day or hour.",
    "Attempts that failed, by the class of their error unless told otherwise.",
)
_command(
    "utilisation",
    UTILISATION,
    "worker, pool, tenant or job.",
    "How long attempts ran, and what share that is of the slots that there were.",
)
