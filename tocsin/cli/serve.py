"""`tocsin up`, `server`, `worker`, `migrate`: the commands that run Tocsin itself."""

from __future__ import annotations

from typing import Annotated

import typer

from tocsin.cli.output import print_json
from tocsin.cli.shared import Json, assignments

Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")]
Database = Annotated[str | None, typer.Option(help="PostgreSQL to use.", metavar="URL")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow listening beyond loopback without TLS.")]
Module = Annotated[
    str | None, typer.Argument(help="Python functions to serve.", metavar="[module:app]", show_default=False)
]
Slots = Annotated[int | None, typer.Option(min=1, help="How many runs at once per worker.", metavar="N")]


def up(
    module: Module = None,
    host: Host = None,
    port: Port = None,
    database: Database = None,
    insecure: Insecure = False,
    workers: Annotated[int, typer.Option(min=0, help="How many workers.", metavar="N")] = 1,
    slots: Slots = None,
) -> None:
    """Run everything on this machine: PostgreSQL, the server and workers."""
    from tocsin.cli.up import up as run_up
    from tocsin.settings import Settings

    settings = Settings.load(host=host, port=port, database_url=database, insecure=insecure or None)
    raise typer.Exit(run_up(settings, workers=workers, slots=slots, module=module))


def server(host: Host = None, port: Port = None, database: Database = None, insecure: Insecure = False) -> None:
    """Run one server node."""
    from tocsin.node.assemble import serve
    from tocsin.settings import Settings

    settings = Settings.load(host=host, port=port, database_url=database, insecure=insecure or None)
    raise typer.Exit(serve(settings))


def worker(
    module: Module = None,
    pool: Annotated[str, typer.Option(help="The pool it serves.")] = "default",
    slots: Slots = None,
    label: Annotated[list[str] | None, typer.Option(help="A label.", metavar="NAME=VALUE")] = None,
    name: Annotated[str | None, typer.Option(help="Its name in lists; this machine's if not given.")] = None,
) -> None:
    """Run one worker."""
    from tocsin.client import credentials
    from tocsin.settings import Settings
    from tocsin.worker.main import run

    settings = Settings.load()
    found = credentials.find(purpose="worker")
    labels = assignments(label, "--label")
    code = run(
        url=found.url,
        key=found.key,
        module=module,
        pool=pool,
        slots=slots,
        name=name,
        labels=labels,
        settings=settings,
    )
    raise typer.Exit(code)


def migrate(database: Database = None, as_json: Json = False) -> None:
    """Bring the database's schema up to date."""
    from tocsin.node.assemble import migrate as run_migrate
    from tocsin.settings import Settings

    applied = run_migrate(Settings.load(database_url=database))
    if as_json:
        print_json({"applied": applied})
    else:
        typer.echo("\n".join(f"applied {name}" for name in applied) or "the schema is up to date")
