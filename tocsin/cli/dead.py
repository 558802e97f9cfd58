"""`tocsin dead`: the dead letters, runs that used up their attempts."""

from typing import Annotated

import typer

from tocsin.cli.output import Column, Document, now, print_done, print_list
from tocsin.cli.run import why
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, connect, find_job_id, noun, page_size
from tocsin.cli.text import pairs, relative

app = noun("Decide about runs that used up their attempts.")

Ids = Annotated[list[str], typer.Argument(help="Ids from `tocsin dead list`.", metavar="ID…", show_default=False)]


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
    job: Annotated[str | None, typer.Option(help="Only of this job, by id or name.")] = None,
    error_class: Annotated[str | None, typer.Option(help="Only what died of this error.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List dead letters, newest first."""
    with connect() as client:
        job_id = None if job is None else find_job_id(client, job)
        found = client.list_dead(job=job_id, error_class=error_class, limit=page_size(limit))
        print_list(found, COLUMNS, limit=limit, as_json=as_json)


@app.command()
def redrive(ids: Ids, as_json: Json = False) -> None:
    """Run dead letters again."""
    with connect() as client:
        answer = client.redrive_dead(ids)
    print_done(answer, f"redriven: {count(answer, len(ids))}", as_json)


@app.command()
def discard(ids: Ids, as_json: Json = False) -> None:
    """Let dead letters go; their history stays."""
    with connect() as client:
        answer = client.discard_dead(ids)
    print_done(answer, f"discarded: {count(answer, len(ids))}", as_json)
