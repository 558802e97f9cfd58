"""`tocsin dead`: the dead letters, runs that used up their attempts."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.cli.output import Column, Document, now, print_done, print_json, print_list, progress
from tocsin.cli.shared import DEFAULT_LIMIT, REFUSED, Ids, Json, Limit, connect, find_job_id, noun, page_size
from tocsin.cli.text import pairs, plain, relative, why

if TYPE_CHECKING:
    from tocsin.client.sync import Client

app = noun("Decide about runs that used up their attempts.")

Letters = Annotated[
    list[str] | None, typer.Argument(help="Ids from `tocsin dead list`.", metavar="[ID…]", show_default=False)
]
All = Annotated[bool, typer.Option("--all", help="All of them, or all that --job and --error-class leave.")]
Job = Annotated[str | None, typer.Option(help="Only of this job, by id or name.")]
ErrorClass = Annotated[str | None, typer.Option(help="Only what died of this error.")]

CHUNK = 500
_TOLD = 5  # how many refusals are told one by one

Decide = Callable[[list[str]], Document]

COLUMNS = [
    Column("ID", lambda letter: letter["id"], whole=True),
    Column("JOB", lambda letter: letter.get("job_name") or letter.get("job_id")),
    Column("DIED", lambda letter: relative(letter.get("died_at"), now())),
    Column("ARGS", lambda letter: pairs(letter.get("args"))),
    Column("WHY", why),
]


def count(answer: Document, asked: int) -> int:
    """How many an answer speaks of."""
    items = answer.get("items")
    return len(items) if isinstance(items, list) else int(answer.get("count", asked))


@app.command("list")
def list_(
    job: Job = None,
    error_class: ErrorClass = None,
    limit: Limit = DEFAULT_LIMIT,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """List dead letters, newest first."""
    with connect() as client:
        job_id = None if job is None else find_job_id(client, job)
        found = client.list_dead(job=job_id, error_class=error_class, limit=page_size(limit))
        print_list(found, COLUMNS, limit=limit, as_json=as_json, ids=ids)


@app.command()
def redrive(
    ids: Letters = None,
    all_: All = False,
    job: Job = None,
    error_class: ErrorClass = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Begin so many at a time, such as 100/s, 10/min or 5/h; takes 5,000 at most.", metavar="RATE"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run dead letters again: those named, or with --all every one."""
    given = _named(ids, all_, job, error_class)
    with connect() as client:
        if given:
            answer = client.redrive_dead(given, rate=rate)
            print_done(answer, f"redriven: {count(answer, len(given))}", as_json)
        elif rate:
            _spread(client, job, error_class, rate, as_json)
        else:
            _in_bulk(_find(client, job, error_class), client.redrive_dead, "redriven", as_json)


@app.command()
def discard(
    ids: Letters = None,
    all_: All = False,
    job: Job = None,
    error_class: ErrorClass = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Let dead letters go: those named, or with --all every one; their history stays."""
    given = _named(ids, all_, job, error_class)
    with connect() as client:
        if given:
            answer = client.discard_dead(given)
            print_done(answer, f"discarded: {count(answer, len(given))}", as_json)
            return
        found = _find(client, job, error_class)
        if found and not yes:
            if not sys.stdin.isatty():
                raise typer.BadParameter(f"{len(found)} dead letters would go; say --yes", param_hint="--all")
            typer.confirm(f"Discard {len(found)} dead letters?", abort=True, err=True)
        _in_bulk(found, client.discard_dead, "discarded", as_json)


def _named(ids: list[str] | None, all_: bool, job: str | None, error_class: str | None) -> list[str]:
    """The ids given; none if all are meant."""
    if ids and (all_ or job or error_class):
        raise typer.BadParameter("give either ids or --all with --job and --error-class, not both")
    if not ids and not all_:
        raise typer.BadParameter("give ids from `tocsin dead list`, or --all")
    return ids or []


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────


def _find(client: "Client", job: str | None, error_class: str | None) -> list[str]:
    # Read to the end before anything is decided: what dies again meanwhile is not among them.
    job_id = None if job is None else find_job_id(client, job)
    return [str(letter["id"]) for letter in client.list_dead(job=job_id, error_class=error_class, limit=500)]


def _spread(client: "Client", job: str | None, error_class: str | None, rate: str, as_json: bool) -> None:
    # One call only: the runs of a second one would begin now as well, beside those of the first.
    chosen = {"job": None if job is None else find_job_id(client, job), "error_class": error_class}
    answer = client.redrive_dead(filter=chosen, rate=rate)
    left = answer.get("remaining")
    told = f"; left: {left}, beyond 5,000 or of cancelled jobs" if left else ""
    print_done(answer, f"redriven: {count(answer, 0)}{told}", as_json)


def _in_bulk(ids: list[str], decide: Decide, done: str, as_json: bool) -> None:
    refused: list[tuple[str, str]] = []
    with progress(len(ids), done, CHUNK) as advance:
        for start in range(0, len(ids), CHUNK):
            chunk = ids[start : start + CHUNK]
            refused += _decide(chunk, decide)
            advance(len(chunk))
    accepted = len(ids) - len(refused)
    if as_json:
        told = [{"id": id_, "detail": detail} for id_, detail in refused]
        print_json({done: accepted, "refused": told})
    else:
        typer.echo(f"{done}: {accepted}")
        for id_, detail in refused[:_TOLD]:
            typer.echo(plain(f"refused: {id_}: {detail}"), err=True)
        if len(refused) > _TOLD:
            typer.echo(f"refused: {len(refused) - _TOLD} more; --json lists them", err=True)
    if refused:
        raise typer.Exit(REFUSED)


def _decide(ids: Sequence[str], decide: Decide) -> list[tuple[str, str]]:
    """Decide about a chunk; the server takes all of it or nothing, so one that is refused is halved to find whom.

    Answers the ones refused, such as those of a job that is cancelled, with the reason.
    """
    from tocsin.client.core import ApiError

    try:
        decide(list(ids))
    except ApiError as error:
        if error.status not in (404, 409):
            raise
        if len(ids) == 1:
            return [(ids[0], error.detail)]
        half = len(ids) // 2
        return _decide(ids[:half], decide) + _decide(ids[half:], decide)
    return []
