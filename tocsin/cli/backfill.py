"""`tocsin backfill`: list, show, pause, resume, cancel; and `begin`, which is `tocsin job backfill`."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tocsin.cli.live import Step, follow
from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_json, print_list
from tocsin.cli.shared import (
    DEFAULT_LIMIT,
    REFUSED,
    BackfillState,
    Ids,
    JobRef,
    Json,
    Limit,
    Reason,
    connect,
    find_job,
    find_job_id,
    json_object,
    noun,
    page_size,
)
from tocsin.cli.text import local, pairs, plain, relative, when

if TYPE_CHECKING:
    from tocsin.client.sync import Client

app = noun("Look after past ranges that are being filled (`tocsin job backfill` begins one).")

BackfillId = Annotated[str, typer.Argument(help="The backfill's id.", metavar="BACKFILL", show_default=False)]


def _ended(backfill: Document) -> int:
    return int(backfill["succeeded"] + backfill["failed"] + backfill["cancelled"])


def _span(document: Document) -> str:
    return f"{local(document['from'])} – {local(document['to'])}"


def _counts(backfill: Document) -> str:
    """What became of its runs, as far as there is something to tell."""
    told = ("live", "succeeded", "failed", "cancelled")
    return ", ".join(f"{backfill[name]} {name}" for name in told if backfill[name])


COLUMNS = [
    Column("ID", lambda backfill: backfill["id"], whole=True),
    Column("JOB", lambda backfill: backfill.get("job_name") or backfill["job_id"]),
    Column("STATE", lambda backfill: backfill["state"], whole=True),
    Column("ENDED", lambda backfill: f"{_ended(backfill)} of {backfill['total']}", whole=True),
    Column("FAILED", lambda backfill: backfill["failed"] or "", whole=True),
    Column("RANGE", _span, spare=True),
    Column("BEGUN", lambda backfill: relative(backfill["created_at"], now())),
]


def _fields(backfill: Document) -> Fields:
    yield "id", backfill["id"]
    yield "job", f"{backfill.get('job_name') or ''} {backfill['job_id']}".strip()
    yield "state", backfill["state"]
    yield "range", _span(backfill)
    yield "only", "" if backfill.get("rerun", "all") == "all" else f"what is {backfill['rerun']}"
    yield (
        "runs",
        f"{backfill['made']} of {backfill['total']} made" + (f": {_counts(backfill)}" if backfill["made"] else ""),
    )
    yield "next", local(backfill["next_at"])
    yield "at a time", str(backfill["max_concurrency"])
    yield "priority", str(backfill["priority"])
    yield "args", pairs(backfill["args"])
    yield "begun", when(backfill["created_at"], now())
    yield "ended", when(backfill["finished_at"], now())
    for failure in backfill["failures"]:
        yield "failed", f"{local(failure['logical_at'])}  run {failure['id']}"


@app.command("list")
def list_(
    job: Annotated[str | None, typer.Option(help="Only of this job, by id or name.")] = None,
    state: Annotated[BackfillState | None, typer.Option(help="Backfills in this state.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """List backfills, newest first."""
    with connect() as client:
        job_id = None if job is None else find_job_id(client, job)
        found = client.list_backfills(job=job_id, state=state, limit=page_size(limit))
        print_list(found, COLUMNS, limit=limit, as_json=as_json, ids=ids)


@app.command()
def show(
    backfill: BackfillId,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Show how far it is until it has ended.")] = False,
    as_json: Json = False,
) -> None:
    """Show one backfill and how far it is."""
    with connect() as client:
        document = client.get_backfill(backfill)
        if wait:
            document = _follow(client, document)
    print_document(document, _fields, as_json)
    if wait:
        _leave(document)


@app.command()
def pause(backfill: BackfillId, reason: Reason = "", as_json: Json = False) -> None:
    """Make no more runs of it until it is resumed; those that live go on."""
    with connect() as client:
        answer = client.pause_backfill(backfill, reason)
    print_done(answer, f"paused {answer['id']}, {_so_far(answer)}", as_json)


@app.command()
def resume(backfill: BackfillId, reason: Reason = "", as_json: Json = False) -> None:
    """End a pause."""
    with connect() as client:
        answer = client.resume_backfill(backfill, reason)
    print_done(answer, f"resumed {answer['id']}, {_so_far(answer)}", as_json)


@app.command()
def cancel(
    backfill: BackfillId,
    reason: Reason = "",
    leave_running: Annotated[bool, typer.Option("--leave-running", help="Let its running runs finish.")] = False,
    as_json: Json = False,
) -> None:
    """End it for good and stop its runs."""
    with connect() as client:
        running: Literal["leave", "stop"] = "leave" if leave_running else "stop"
        answer = client.cancel_backfill(backfill, reason, running=running)
    print_done(answer, f"cancelled {answer['id']}, {_so_far(answer)}", as_json)


def _so_far(backfill: Document) -> str:
    return f"{_ended(backfill)} of {backfill['total']} ended"


# ── beginning one ────────────────────────────────────────────────────────────────────────────────────────────────


def begin(
    job: JobRef,
    from_: Annotated[
        str, typer.Option("--from", help="From this instant on; a date is its midnight where the schedule is.")
    ],
    to: Annotated[str, typer.Option(help="Before this instant or date.")],
    max_concurrency: Annotated[int | None, typer.Option(help="So many runs at a time; 1 unless told.")] = None,
    priority: Annotated[int | None, typer.Option(help="Of its runs; 100 unless told, behind live work.")] = None,
    args: Annotated[str | None, typer.Option(help="Arguments of each run, a JSON object.", metavar="JSON")] = None,
    schedule: Annotated[
        str | None, typer.Option(help='Instead of the job\'s, such as {"cron": "0 0 * * *"}.', metavar="JSON")
    ] = None,
    rerun: Annotated[
        Literal["all", "missing", "failed"],
        typer.Option(help="All of it, what never ran (missing), or what never succeeded (failed)."),
    ] = "all",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Annotated[
        bool | None, typer.Option("--wait/--no-wait", help="Show how far it is until it has ended; so at a terminal.")
    ] = None,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Run what a job owed in a past range, each run with the instant it stands for. Counts first, and asks."""
    given, by = json_object(args, "--args"), json_object(schedule, "--schedule")
    with connect() as client:
        document = find_job(client, job)
        zone = (by or document.get("schedule") or {}).get("timezone") or "UTC"
        asked: dict[str, Any] = {
            **{"from_": _instant(from_, zone, "--from"), "to": _instant(to, zone, "--to"), "args": given},
            **{"max_concurrency": max_concurrency, "priority": priority, "schedule": by},
            "rerun": None if rerun == "all" else rerun,
        }
        if dry_run or not yes:
            counted = client.backfill(document["id"], **asked, dry_run=True)
            if dry_run:
                print_json(counted) if as_json else typer.echo(_preview(counted, rerun))
                return
            _confirm(counted, rerun)
        made = client.backfill(document["id"], **asked)
        wait = sys.stdout.isatty() and not (as_json or ids) if wait is None else wait
        if wait:
            made = _follow(client, made)
    told = f"backfill {made['id']} {made['state']}, {made['total']} runs"
    print_done(made, f"{told}: {_counts(made)}" if wait else f"{told}; tocsin backfill show {made['id']}", as_json, ids)
    if wait:
        _leave(made)


def _instant(text: str, zone: str, option: str) -> str:
    """An instant as it is; a date as its first moment where the schedule is."""
    from datetime import date, datetime, time
    from zoneinfo import ZoneInfo

    if len(text) != len("2026-01-01"):
        return text
    try:
        return datetime.combine(date.fromisoformat(text), time(), ZoneInfo(zone)).isoformat()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a date nor an instant", param_hint=option) from None


def _preview(counted: Document, rerun: str) -> str:
    """What there is to do, in one or two lines."""
    if not counted["total"]:
        owed = {"all": "was owed", "missing": "is missing", "failed": "is missing or failed"}
        return f"no runs: nothing {owed[rerun]} in this range"
    shown = [local(at) for at in counted["first"][:3]]
    if counted["total"] > len(shown):
        shown += ["…"] * (counted["total"] > len(shown) + 1) + [local(counted["last"])]
    many = ", more than one backfill may have" if counted["too_many"] else ""
    return plain(f"{counted['total']:,} runs{many}: {', '.join(shown)}")


def _confirm(counted: Document, rerun: str) -> None:
    if counted["too_many"] or not counted["total"]:
        return  # the server says why not
    typer.echo(_preview(counted, rerun), err=True)
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"{counted['total']} runs would be made; say --yes", param_hint="job backfill")
    typer.confirm("Make them?", abort=True, err=True)


def _follow(client: "Client", backfill: Document) -> Document:
    id_ = str(backfill["id"])
    try:
        return follow(lambda: client.get_backfill(id_), _step, backfill.get("job_name") or id_)
    except KeyboardInterrupt:
        typer.echo(f"it goes on; tocsin backfill show -w {id_}, or cancel {id_}", err=True)
        raise


def _step(backfill: Document) -> Step:
    words = f"{_counts(backfill)}{'' if backfill['state'] == 'running' else ', ' + backfill['state']}"
    over = backfill["state"] in ("completed", "cancelled") and not backfill["live"]
    return Step(_ended(backfill), backfill["total"], words, over)


def _leave(backfill: Document) -> None:
    """What scripts go by: whether all of it was done."""
    if backfill["succeeded"] < backfill["total"]:
        raise typer.Exit(REFUSED)
