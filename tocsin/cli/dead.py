"""`tocsin dead`: the dead letters, runs that used up their attempts."""

from typing import Annotated

import typer

from tocsin.cli.output import Column, Document, now, print_done, print_list
from tocsin.cli.run import why
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, connect, find_job_id, noun, page_size
from tocsin.cli.text import relative

app = noun("Decide about runs that used up their attempts.")

Ids = Annotated[list[str], typer.Argument(help="Ids from `tocsin dead list`.", metavar="ID…", show_default=False)]


def _died(letter: Document) -> str:
    return relative(letter.get("died_at") or letter.get("finished_at") or letter.get("created_at"), now())


COLUMNS = [
    Column("ID", lambda letter: letter.get("id") or letter.get("run_id"), whole=True),
    Column("JOB", lambda letter: letter.get("job_name") or letter.get("job_id")),
    Column("DIED", _died),
    Column("TRIES", lambda letter: letter.get("attempt") or letter.get("attempts")),
    Column("WHY", why),
]


def count(answer: Document, asked: int) -> int:
    """How many an answer speaks of."""
    items = answer.get("items")
    return len(items) if isinstance(items, list) else int(answer.get("count", asked))


@app.command("list")
def list_(
    job: Annotated[str | None, typer.Option(help="Only of this job, by id or name.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List dead letters, newest first."""
    with connect() as client:
        job_id = None if job is None else find_job_id(client, job)
        print_list(client.list_dead(job=job_id, limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


@app.command()
def redrive(
    ids: Ids,
    same_version: Annotated[
        bool, typer.Option("--same-version", help="With the job as it was, not as it is now.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run dead letters again."""
    with connect() as client:
        answer = client.redrive_dead(ids, same_version=same_version)
    print_done(answer, f"redriven: {count(answer, len(ids))}", as_json)


@app.command()
def discard(ids: Ids, as_json: Json = False) -> None:
    """Let dead letters go; their history stays."""
    with connect() as client:
        answer = client.discard_dead(ids)
    print_done(answer, f"discarded: {count(answer, len(ids))}", as_json)
