"""`tocsin up`, `server`, `worker`: the commands that run Tocsin itself."""

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tocsin.cli.shared import assignments, megabytes

if TYPE_CHECKING:
    from tocsin.settings import Settings

Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Port to listen on.")]
Database = Annotated[str | None, typer.Option(help="PostgreSQL to use.", metavar="URL")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow listening beyond loopback without TLS.")]
TlsCert = Annotated[
    str | None, typer.Option(help="Certificate and chain, in PEM: the API speaks HTTPS.", metavar="FILE")
]
TlsKey = Annotated[str | None, typer.Option(help="Its private key, unless in the same file.", metavar="FILE")]
Module = Annotated[
    str | None, typer.Argument(help="Python functions to serve.", metavar="[module:app]", show_default=False)
]
Slots = Annotated[
    int | None,
    typer.Option(min=1, help="How many runs at once per worker; else twice the processors, at least 8.", metavar="N"),
]


def load_settings(**given: Any) -> "Settings":
    """Read before the server is loaded: what is misspelt is told at once."""
    from tocsin.settings import Settings

    return Settings.load(**given)


def _default_slots() -> int:
    """Jobs wait more than they compute, so there are more slots than processors."""
    return max(8, 2 * (os.cpu_count() or 1))


def _default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _reloading() -> int:
    from tocsin.cli.reload import reloading

    same = [argument for argument in sys.argv[1:] if argument != "--reload"]
    return reloading([sys.executable, "-m", "tocsin", *same], Path.cwd())


def up(
    module: Module = None,
    host: Host = None,
    port: Port = None,
    database: Database = None,
    insecure: Insecure = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    workers: Annotated[int, typer.Option(min=0, help="How many workers.", metavar="N")] = 1,
    slots: Slots = None,
) -> None:
    """Run everything on this machine: PostgreSQL, the server and workers."""
    settings = load_settings(
        host=host, port=port, database_url=database, insecure=insecure or None, tls_cert=tls_cert, tls_key=tls_key
    )
    from tocsin.cli.up import up as run_up

    raise typer.Exit(run_up(settings, workers=workers, slots=slots, module=module))


def server(
    host: Host = None,
    port: Port = None,
    database: Database = None,
    insecure: Insecure = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Run one server node."""
    settings = load_settings(
        host=host, port=port, database_url=database, insecure=insecure or None, tls_cert=tls_cert, tls_key=tls_key
    )
    from tocsin.node.assemble import serve

    raise typer.Exit(serve(settings))


def worker(
    module: Module = None,
    pool: Annotated[str, typer.Option(help="The pool it serves.")] = "default",
    slots: Slots = None,
    label: Annotated[list[str] | None, typer.Option(help="A label.", metavar="NAME=VALUE")] = None,
    cpu: Annotated[float | None, typer.Option(min=0, help="Processors it offers; else all there are.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory it offers, such as 8g; else all there is.")] = None,
    disk: Annotated[str | None, typer.Option(help="Disk it offers, such as 10g; else what is free.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="Gpus it offers; else those of NVIDIA's driver.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name in lists; else the machine's and the process's.")] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Start anew when a Python file below this folder changes; to develop with.")
    ] = False,
) -> None:
    """Run one worker."""
    if reload:
        raise typer.Exit(_reloading())
    from tocsin.client import credentials

    settings = load_settings()
    found = credentials.find(purpose="worker")
    labels = assignments(label, "--label")
    from tocsin.worker import machine
    from tocsin.worker.main import run

    told = {"cpu": cpu, "memory_mb": megabytes(memory, "--memory"), "disk_mb": megabytes(disk, "--disk"), "gpus": gpus}

    code = run(
        url=found.url,
        key=found.key,
        ca=found.ca,
        module=module,
        pool=pool,
        slots=slots or _default_slots(),
        name=name or _default_name(),
        labels=labels,
        resources=machine.resources() | {key: amount for key, amount in told.items() if amount is not None},
        editor=credentials.find_editor(),
        settings=settings,
    )
    raise typer.Exit(code)
