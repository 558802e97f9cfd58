"""`tocsin logs`: search."""

from typing import Annotated

import typer

from tocsin.cli.output import print_json
from tocsin.cli.shared import DEFAULT_LIMIT, Limit, connect, find_job_id, noun, tag_filter
from tocsin.cli.text import local, plain

app = noun("Find lines in the logs of all runs.")


@app.command()
def search(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Words that a line must have; begin* begins a word, '\"a b\"' follow each other."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Only of this job, by id or name.")] = None,
    run: Annotated[str | None, typer.Option(help="Only of this run, oldest first.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only of runs with this tag.", metavar="NAME=VALUE")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="Not before this instant.")] = None,
    to: Annotated[str | None, typer.Option(help="Before this instant.")] = None,
    level: Annotated[str | None, typer.Option(help="Only of this level, such as error.")] = None,
    error_class: Annotated[str | None, typer.Option(help="Only of attempts that failed with this error.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document a line.")] = False,
) -> None:
    """Print the lines that have all these words, newest first."""
    with connect() as client:
        found = client.search_logs(
            " ".join(words) if words else None,
            job=None if job is None else find_job_id(client, job),
            run=run,
            tag=tag_filter(tag),
            from_=from_,
            to=to,
            level=level,
            error_class=error_class,
            limit=min(limit or 500, 500),
        )
        count = 0
        for count, line in enumerate(found, 1):
            if as_json:
                print_json(line, indent=None)
            else:
                typer.echo(f"{local(line.get('ts'))}  {line['run_id']}  {plain(line.get('text', ''))}")
            if count == limit:
                # To look for one more might take as long as all of it did.
                typer.echo(f"the first {limit}; there may be more, with --limit", err=True)
                return
        if not count:
            typer.echo("no such line", err=True)
