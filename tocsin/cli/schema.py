"""`tocsin migrate`, `tocsin restored`: what is done to the database itself, as its owner."""

from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.cli.output import Column, Document, now, print_json, print_table
from tocsin.cli.serve import Database, load_settings
from tocsin.cli.shared import REFUSED, Json
from tocsin.cli.text import when

if TYPE_CHECKING:
    from tocsin.store.migrate import Migrated, Older, Status

_COLUMNS = [
    Column("MIGRATION", lambda migration: migration["name"], whole=True),
    Column("PHASE", lambda migration: migration["phase"]),
    Column("APPLIED", lambda migration: when(migration["applied_at"], now()) or "pending"),
]


def migrate(
    database: Database = None,
    post: Annotated[
        bool, typer.Option("--post", help="Apply contractions, too, though older servers seem to live.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="List the migrations; change nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="The same, and exit 1 if this release cannot work on the schema.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Bring the database's schema up to date, while servers work. What only older servers need goes when the last of
    them has gone."""
    settings = load_settings(database_url=database)
    if status or check:
        from tocsin.node.assemble import migration_status

        found = migration_status(settings)
        _print_status(found, as_json)
        raise typer.Exit(REFUSED if check and not found.ready else 0)
    from tocsin.node.assemble import migrate as run_migrate

    _print_migrated(run_migrate(settings, post=post, say=_say), as_json)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print_status(status: "Status", as_json: bool) -> None:
    migrations: list[Document] = [
        {"name": m.name, "phase": m.phase, "applied_at": m.applied_at and m.applied_at.isoformat()}
        for m in status.migrations
    ]
    if as_json:
        servers = [server._asdict() for server in status.servers]
        print_json({"ready": status.ready, "migrations": migrations, "servers": servers})
        return
    print_table(migrations, _COLUMNS)
    typer.echo(f"servers: {_names(status.servers) or 'none'}")
    typer.echo(f"this release {'can' if status.ready else 'cannot'} work on this schema")


def _print_migrated(done: "Migrated", as_json: bool) -> None:
    if as_json:
        older = [server._asdict() for server in done.older]
        print_json({"applied": done.applied, "waiting": done.waiting, "older_servers": older})
        return
    for name in done.applied:
        typer.echo(f"applied {name}")
    for name in done.waiting:
        typer.echo(f"{name} waits until older servers have gone: {_names(done.older)}")
    if not done.applied and not done.waiting:
        typer.echo("the schema is up to date")


def _names(servers: "list[Older]") -> str:
    return ", ".join(f"{server.name} ({server.version})" for server in servers)


def restored(
    database: Database = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """After a backup was restored, before servers start: let fences go on above all that were handed out, declare every
    worker gone, and run again what they ran."""
    settings = load_settings(database_url=database)
    if not yes:
        typer.confirm("Every worker is declared gone, and what was running is run again. Go on?", abort=True, err=True)
    from tocsin.node.assemble import restored as run_restored

    done = run_restored(settings)
    if as_json:
        print_json(done._asdict())
        return
    typer.echo(f"fences go on in epoch {done.epoch}")
    typer.echo(f"{done.workers} workers were declared gone; those that live register anew")
    typer.echo(f"{done.runs} runs were taken back and will run again; none of it counts as a failure or a loss")
    if done.servers:
        typer.echo(f"these servers were running already and go down within seconds: {', '.join(done.servers)}")
