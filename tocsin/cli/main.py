"""The command line. Commands import what they need when they run, so that `tocsin --help` is immediate; for the
same reason their modules have no `from __future__ import annotations`: typer would evaluate each string at every start.
"""

from typing import Annotated

import typer

from tocsin import __version__
from tocsin.cli import (
    audit,
    backfill,
    calendar,
    circuit,
    dead,
    events,
    fleet,
    job,
    key,
    logs,
    pool,
    report,
    run,
    schedule,
    schema,
    secret,
    serve,
    tenant,
    tools,
    workflow,
)
from tocsin.cli.shared import EXIT_CODES, Root, act_for

app = typer.Typer(
    cls=Root,
    help="Cron as a service: jobs at the right instant, on a pool of workers, with every run on record.",
    epilog=f"{EXIT_CODES} Colour only at a terminal, and not if NO_COLOR is set.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (
    *(serve.up, serve.server, serve.worker, schema.migrate, schema.restored),
    *(events.events, tools.doctor, tools.demo, tools.completion),
):
    app.command()(command)
for room in (
    job,
    run,
    workflow,
    backfill,
    logs,
    report,
    dead,
    schedule,
    calendar,
    circuit,
    secret,
    fleet,
    pool,
    tenant,
    key,
    audit,
):
    app.add_typer(room.app, name=room.__name__.rpartition(".")[2])


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tocsin {__version__}")
        raise typer.Exit


@app.callback()
def root(
    tenant: Annotated[
        str | None, typer.Option(help="Act for this tenant; needs a platform key.", metavar="SLUG")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    act_for(tenant)


def main() -> None:
    """The entry point of the `tocsin` command."""
    app(prog_name="tocsin")
