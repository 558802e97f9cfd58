"""`tocsin run`: list, show, explain, logs, cancel, retry."""

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.cli.output import (
    Column,
    Document,
    Fields,
    colour,
    now,
    print_coloured,
    print_document,
    print_done,
    print_json,
    print_list,
    print_table,
)
from tocsin.cli.shared import (
    DEFAULT_LIMIT,
    Ids,
    Json,
    Limit,
    Outcome,
    Reason,
    RunId,
    RunState,
    connect,
    find_job_id,
    noun,
    page_size,
    tag_filter,
)
from tocsin.cli.text import length, local, milliseconds, pairs, plain, relative, when, why

if TYPE_CHECKING:
    from tocsin.client.sync import Client

_MOST_SHOWN = 65_536  # characters of a result

app = noun("See what ran, runs and will run; stop it or run it again.")


COLUMNS = [
    Column("ID", lambda run: run["id"], whole=True),
    Column("JOB", lambda run: run.get("job_name") or run.get("job_id")),
    Column("STATE", lambda run: run["state"], whole=True),
    Column("TRY", lambda run: run.get("attempt"), spare=True),
    Column("SCHEDULED", lambda run: local(run.get("scheduled_for"))),
    Column("LAG", lambda run: milliseconds(run.get("start_lag_ms")), spare=True),
    Column("TOOK", lambda run: milliseconds(run.get("duration_ms")), spare=True),
    Column("WHY", why),
]

ATTEMPTS = [
    Column("TRY", lambda attempt: attempt.get("attempt")),
    Column("OUTCOME", lambda attempt: attempt.get("outcome") or attempt.get("state")),
    Column("STARTED", lambda attempt: local(attempt.get("started_at"))),
    Column("TOOK", lambda attempt: milliseconds(attempt.get("duration_ms"))),
    Column("EXIT", lambda attempt: attempt.get("exit_code")),
    Column("WORKER", lambda attempt: attempt.get("worker")),
    Column("WHY", why),
]


def _fields(run: Document) -> Fields:
    yield "id", run["id"]
    yield "job", f"{run.get('job_name') or ''} {run.get('job_id', '')} v{run.get('job_version', '?')}".strip()
    yield "state", run["state"]
    yield "outcome", run.get("outcome") or ""
    yield "why", why(run)
    yield "attempt", f"{run.get('attempt', 0)} (failures {run.get('failures', 0)} of {run.get('max_attempts', '?')})"
    yield "losses", str(run.get("losses") or "")
    yield "trigger", run.get("trigger") or ""
    yield "again of", run.get("origin_run_id") or ""
    yield "priority", str(run.get("priority", ""))
    yield "stands for", local(run.get("logical_at"))
    yield "scheduled", when(run.get("scheduled_for"), now())
    yield "ready", when(run.get("ready_at"), now())
    yield "started", when(run.get("started_at"), now())
    yield "start lag", milliseconds(run.get("start_lag_ms"))
    yield "finished", when(run.get("finished_at"), now())
    yield "took", milliseconds(run.get("duration_ms"))
    yield "worker", run.get("worker") or ""
    yield "progress", "" if run.get("progress") is None else f"{run['progress']:.0%}"
    yield "exit code", "" if run.get("exit_code") is None else str(run["exit_code"])
    yield "args", pairs(run.get("args"))
    yield "result", _result(run.get("result"))
    yield "tags", pairs(run.get("tags"))


def _result(result: object) -> str:
    """As JSON; of one that would fill a hundred screens the beginning."""
    text = "" if result is None else json.dumps(result, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else f"{text[:1000]}… ({len(text):,} characters: --json has them all)"


@app.command("list")
def list_(
    job: Annotated[str | None, typer.Option(help="Runs of this job, by id or name.")] = None,
    state: Annotated[RunState | None, typer.Option(help="Runs in this state.")] = None,
    outcome: Annotated[Outcome | None, typer.Option(help="Runs whose last attempt ended so.")] = None,
    error_class: Annotated[str | None, typer.Option(help="Runs that failed with this error.")] = None,
    worker: Annotated[str | None, typer.Option(help="Runs of this worker.")] = None,
    tag: Annotated[str | None, typer.Option(help="Runs with this tag.", metavar="NAME=VALUE")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Not before this instant.")] = None,
    to: Annotated[str | None, typer.Option(help="Before this instant.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on showing what changes, until Ctrl-C; with --json line by line.")
    ] = False,
    limit: Limit = DEFAULT_LIMIT,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """List runs, newest first."""
    with connect() as client:
        job_id = None if job is None else find_job_id(client, job)

        def find(most: int) -> Iterator[Document]:
            return client.list_runs(
                job=job_id,
                state=state,
                outcome=outcome,
                error_class=error_class,
                worker=worker,
                tag=tag_filter(tag),
                from_=from_,
                to=to,
                limit=most,
            )

        def read(most: int) -> Sequence[Document]:
            return list(islice(find(min(most, 500)), most))

        if watch:
            from tocsin.cli.live import watch as go_on

            go_on(read, COLUMNS, limit=limit, as_json=as_json)
        else:
            print_list(find(page_size(limit)), COLUMNS, limit=limit, as_json=as_json, ids=ids)


@app.command()
def show(
    run: RunId,
    attempts: Annotated[bool, typer.Option("--attempts", help="Each attempt too.")] = False,
    as_json: Json = False,
) -> None:
    """Show one run."""
    with connect() as client:
        document = client.get_run(run)
        tries = list(client.attempts(run)) if attempts else []
    if attempts:
        document["attempts"] = tries
    print_document(document, _fields, as_json)
    if tries and not as_json:
        typer.echo()
        print_table(tries, ATTEMPTS)


@app.command()
def explain(run: RunId, as_json: Json = False) -> None:
    """Say why a run has not started, and when it may; or how it ended."""
    with connect() as client:
        document = client.explain_run(run)
    if as_json:
        print_json(document)
    else:
        print_coloured(_explained(document))


def _explained(document: Document) -> Iterator[tuple[str, str]]:
    """Lines, each with its colour: the first thing in the way stands out."""
    state, found = document["state"], document["blockers"]
    yield f"{state}: {document['summary']}", colour(state) if not found else "bold"
    for number, one in enumerate(found, 1):
        if number > 1:
            yield f"  and {one['message']}", ""
        yield from ((f"      {line}", "dim") for line in _details(one))
    start = document.get("estimated_start_at")
    if start:
        give_or_take = length(timedelta(seconds=document["estimated_error_seconds"]))
        yield f"starts {relative(start, now())}, give or take {give_or_take} ({local(start)})", "green"
    elif found:
        yield "nobody can tell when it starts", "yellow"


def _details(blocker: Document) -> Iterator[str]:
    if blocker.get("since"):
        yield f"since {when(blocker['since'], now())}"
    if blocker.get("until"):
        yield f"until {when(blocker['until'], now())}"
    runs = blocker.get("runs", [])
    if runs:
        yield f"run{'s' * (len(runs) > 1)} {', '.join(runs)}"


@app.command()
def logs(
    run: RunId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    attempt: Annotated[
        int | None,
        typer.Option(min=1, help="Of this attempt; else the latest with lines, or all that come.", metavar="N"),
    ] = None,
    stream: Annotated[str | None, typer.Option(help="Only of this stream, such as stdout.")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="With the time of each line.")] = False,
    as_json: Json = False,
) -> None:
    """Print a run's log. With --follow, --json prints one document per line."""
    with connect() as client:
        if follow:
            lines = follow_logs(client, run, attempt=attempt, stream=stream)
        else:
            lines = client.logs(run, attempt=attempt, stream=stream)
        if as_json and not follow:
            print_json({"items": list(lines)})
            return
        line = None
        for line in lines:
            if as_json:
                print_json(line, indent=None)
            else:
                moment = f"{local(line.get('ts'))}  " if timestamps else ""
                typer.echo(moment + plain(line.get("text", "")))
        if line is None:
            typer.echo("no lines", err=True)


def follow_logs(
    client: "Client",
    run_id: str,
    *,
    attempt: int | None = None,
    stream: str | None = None,
) -> Iterator[Document]:
    """Lines as they come, attempt after attempt, until the run (or the one attempt) has ended."""
    for event in client.tail_logs(run_id, attempt=attempt, stream=stream):
        if event.kind == "over":
            return
        if event.kind == "line":
            yield event.data


@app.command()
def cancel(run: RunId, reason: Reason = "", as_json: Json = False) -> None:
    """Stop a run."""
    with connect() as client:
        answer = client.cancel_run(run, reason)
    print_done(answer, f"run {run} is {answer.get('state', 'cancelled')}", as_json)


@app.command()
def retry(run: RunId, ids: Ids = False, as_json: Json = False) -> None:
    """Run it again, as a new run; of a job of a workflow run, with what was skipped because of it."""
    with connect() as client:
        answer = client.retry_run(run)
    whole = answer.get("workflow_run_id")
    look = f"; tocsin workflow show -f {whole}" if whole else ""
    print_done(answer, f"run {answer['id']} {answer.get('state', '')}, again of {run}{look}", as_json, ids)
