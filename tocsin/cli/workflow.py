"""`tocsin workflow`: apply, list, show, export, run, retry, cancel, pause, resume, delete, backfill."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.cli import backfill
from tocsin.cli.job import COLUMNS as JOB_COLUMNS
from tocsin.cli.job import became, next_run, title
from tocsin.cli.live import follow_drawn
from tocsin.cli.output import (
    Column,
    Document,
    now,
    print_done,
    print_json,
    print_list,
)
from tocsin.cli.shared import (
    DEFAULT_LIMIT,
    REFUSED,
    AnyState,
    Ids,
    IfMatch,
    Json,
    Limit,
    Reason,
    connect,
    find_job,
    find_job_id,
    find_open,
    is_id,
    json_object,
    noun,
    page_size,
)
from tocsin.cli.text import local, milliseconds, relative, why
from tocsin.model.states import LIVE

if TYPE_CHECKING:
    from tocsin.client.sync import Client

app = noun("Run jobs that wait for each other as one: store workflows, run them, see how they go.")

WorkflowRef = Annotated[str, typer.Argument(help="The workflow's id or name.", metavar="WORKFLOW", show_default=False)]
RunRef = Annotated[
    str,
    typer.Argument(help="The run's id, or a workflow's name for its last run.", metavar="RUN", show_default=False),
]
Follow = Annotated[
    bool,
    typer.Option("--follow", "-f", help="Show how it goes until it has ended; exit code 1 unless it succeeded."),
]
_SMALL, _OFTEN, _SELDOM = 200, 0.25, 1.0  # jobs of a run that is looked at often; seconds from one look to the next

COLUMNS = [
    *JOB_COLUMNS[:2],
    Column("STATE", lambda workflow: workflow["state"], whole=True),
    Column("JOBS", lambda workflow: len(workflow["jobs"]), whole=True),
    *JOB_COLUMNS[3:],
]

RUN_COLUMNS = [
    Column("ID", lambda run: run["id"], whole=True),
    Column("WORKFLOW", lambda run: run["workflow_name"] or run["workflow_id"]),
    Column("STATE", lambda run: run["state"], whole=True),
    Column("STANDS FOR", lambda run: local(run["logical_at"]), spare=True),
    Column("STARTED", lambda run: relative(run["started_at"], now())),
    Column("TOOK", lambda run: milliseconds(run["duration_ms"])),
    Column("WHY", why),
]


# ── workflows ────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def apply(
    files: Annotated[
        list[str], typer.Argument(help="YAML or JSON; - reads standard input.", metavar="FILE…", show_default=False)
    ],
    as_json: Json = False,
) -> None:
    """Make workflows what files say: each is made, replaced, or left if it is that already. Runs keep their graph."""
    from tocsin.cli.workflow_file import Refused, read

    done: list[Document] = []
    wrong: list[str] = []
    written = []
    for file in files:
        try:
            written += read(file)
        except Refused as error:
            wrong.append(str(error))
    with connect() as client:
        for workflow in [] if wrong else written:
            before = find_open(client, workflow.name)
            try:
                done.append(workflow.put(client))
            except Refused as error:
                wrong.append(str(error))
                continue
            if not as_json:
                typer.echo(became(before, done[-1]))
    if as_json:
        print_json({"items": done})
    if wrong:
        typer.echo("\n".join(wrong), err=True)
        raise typer.Exit(REFUSED)


@app.command("list")
def list_(
    runs: Annotated[bool, typer.Option("--runs", help="Runs instead, newest first.")] = False,
    workflow: Annotated[
        str | None, typer.Option(help="Only runs of this workflow, by id or name.", metavar="WORKFLOW")
    ] = None,
    state: Annotated[AnyState | None, typer.Option(help="Workflows, or with --runs their runs, in this state.")] = None,
    q: Annotated[str | None, typer.Option("--search", "-q", help="Part of a workflow's name.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """List workflows, or runs of them."""
    with connect() as client:
        if runs or workflow is not None:
            workflow_id = None if workflow is None else find_job_id(client, workflow)
            found = client.list_workflow_runs(workflow=workflow_id, state=state, limit=page_size(limit))
            print_list(found, RUN_COLUMNS, limit=limit, as_json=as_json, ids=ids)
        else:
            found = client.list_workflows(state=state, q=q, limit=page_size(limit))
            print_list(found, COLUMNS, limit=limit, as_json=as_json, ids=ids)


@app.command()
def show(
    what: Annotated[
        str, typer.Argument(help="A workflow's name or id, or a run's id.", metavar="WORKFLOW|RUN", show_default=False)
    ],
    last: Annotated[bool, typer.Option("--last", "-l", help="Of a workflow its last run.")] = False,
    follow: Follow = False,
    as_json: Json = False,
) -> None:
    """Draw a workflow, or a run of it with what became of each job."""
    from tocsin.cli.workflow_view import print_run, print_workflow

    with connect() as client:
        if not (last or follow):
            found = _workflow_or_run(client, what)
            if "head_run_id" in found:
                print_run(found, as_json)
            else:
                print_workflow(found, as_json)
            return
        run_id = _run_id(client, what)
        if not follow:
            print_run(client.get_workflow_run(run_id), as_json)
            return
        run = _wait(client, run_id) if as_json else _follow(client, run_id)
    if as_json:
        print_json(run)
    _leave(run)


def _workflow_or_run(client: "Client", what: str) -> Document:
    from tocsin.client.core import ApiError

    if not is_id(what):
        return client.get_workflow(find_job(client, what)["id"])
    try:
        return client.get_workflow_run(what)
    except ApiError as error:
        if error.status != 404:
            raise
    return client.get_workflow(what)


@app.command()
def export(workflow: WorkflowRef, as_json: Json = False) -> None:
    """Print a workflow as `apply` reads it, without what is so by default."""
    from tocsin.cli.workflow_file import bare
    from tocsin.cli.yamlfile import dump

    with connect() as client:
        document = bare(client.get_workflow(find_job_id(client, workflow)))
    print_json(document) if as_json else typer.echo(dump(document), nl=False)


@app.command()
def pause(workflow: WorkflowRef, reason: Reason = "", if_match: IfMatch = None, as_json: Json = False) -> None:
    """Start no more of its jobs, nor runs of it, until it is resumed."""
    with connect() as client:
        answer = client.pause_workflow(find_job_id(client, workflow), reason, if_match=if_match)
    print_done(answer, f"paused {title(answer)}", as_json)


@app.command()
def resume(workflow: WorkflowRef, reason: Reason = "", if_match: IfMatch = None, as_json: Json = False) -> None:
    """End a pause."""
    with connect() as client:
        answer = client.resume_workflow(find_job_id(client, workflow), reason, if_match=if_match)
    print_done(answer, f"resumed {title(answer)}{next_run(answer)}", as_json)


@app.command()
def delete(workflow: WorkflowRef, if_match: IfMatch = None, as_json: Json = False) -> None:
    """End a workflow for good, stop its runs and free its name; its history stays."""
    with connect() as client:
        answer = client.delete_workflow(find_job_id(client, workflow), if_match=if_match)
    print_done(answer, f"deleted {title(answer)}", as_json)


app.command("backfill")(backfill.begin)


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@app.command()
def run(
    workflow: WorkflowRef,
    args: Annotated[
        str | None, typer.Option(help="Arguments of the jobs that wait for none, a JSON object.", metavar="JSON")
    ] = None,
    at: Annotated[str | None, typer.Option(help="Not now, but at this instant.")] = None,
    priority: Annotated[int | None, typer.Option(help="Instead of the workflow's.")] = None,
    sensitive: Annotated[bool, typer.Option("--sensitive", help="Seal the arguments.")] = False,
    follow: Follow = False,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="The same, told when it has ended.")] = False,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Ask for a run of a workflow."""
    given = json_object(args, "--args")
    with connect() as client:
        workflow_id = find_job_id(client, workflow)
        answer = client.run_workflow(workflow_id, given, at=at, priority=priority, sensitive=sensitive)
        _after(client, answer, f"run {answer['id']} {answer['state']}", follow, wait, ids, as_json)


@app.command()
def retry(
    run: RunRef,
    follow: Follow = False,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="The same, told when it has ended.")] = False,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Run again what failed of a run, and what was not run because of that; what succeeded stays."""
    with connect() as client:
        answer = client.retry_workflow_run(_run_id(client, run))
        _after(client, answer, f"run {answer['id']} {answer['state']} again", follow, wait, ids, as_json)


@app.command()
def cancel(run: RunRef, reason: Reason = "", as_json: Json = False) -> None:
    """Stop a run: what runs of it, and what has not begun. (`delete` ends the workflow itself.)"""
    with connect() as client:
        answer = client.cancel_workflow_run(_run_id(client, run, live=True), reason)
    print_done(answer, f"run {answer['id']} is {answer['state']}", as_json)


def _run_id(client: "Client", ref: str, live: bool = False) -> str:
    """A run's id; of a workflow that of its last run, or of the one that lives."""
    from tocsin.client.core import ApiError

    if is_id(ref):
        return ref
    workflow_id = find_job(client, ref)["id"]
    found = []
    for one in client.list_workflow_runs(workflow=workflow_id, limit=50):
        if not live:
            return str(one["id"])
        found += [str(one["id"])] if one["state"] in LIVE else []
    if len(found) > 1:
        raise typer.BadParameter(f"{ref} has several runs that live: {', '.join(found[:5])}", param_hint="RUN")
    if not found:
        raise ApiError(404, "not_found", f"{ref} has no run{' that lives' if live else ''}")
    return found[0]


def _after(client: "Client", answer: Document, told: str, follow: bool, wait: bool, ids: bool, as_json: bool) -> None:
    """What a call that began something ends with."""
    if follow and not (as_json or ids):
        _leave(_follow(client, answer["id"]))
    elif follow or wait:
        ended = _wait(client, answer["id"])
        print_done(ended, ": ".join(filter(None, (f"run {ended['id']} {ended['state']}", why(ended)))), as_json, ids)
        _leave(ended)
    else:
        print_done(answer, f"{told}; tocsin workflow show -f {answer['id']}", as_json, ids)


def _follow(client: "Client", run_id: str) -> Document:
    """Show a run until it has ended, and how it did."""
    from tocsin.cli.workflow_view import News, print_end, screen

    run = _left_alone(
        run_id,
        lambda: follow_drawn(
            lambda: client.get_workflow_run(run_id),
            screen,
            News().of,
            lambda run: run["state"] not in LIVE,
            lambda run: _OFTEN if len(run["nodes"]) <= _SMALL else _SELDOM,
        ),
    )
    print_end(run)
    return run


def _wait(client: "Client", run_id: str) -> Document:
    return _left_alone(run_id, lambda: client.wait_workflow(run_id))


def _left_alone(run_id: str, look: Callable[[], Document]) -> Document:
    """Look at a run; who looks away by Ctrl-C is told that it goes on."""
    try:
        return look()
    except KeyboardInterrupt:
        typer.echo(f"it goes on; tocsin workflow show -f {run_id}, or cancel {run_id}", err=True)
        raise


def _leave(run: Document) -> None:
    """What scripts go by: whether it succeeded."""
    if run["state"] != "succeeded":
        raise typer.Exit(REFUSED)
