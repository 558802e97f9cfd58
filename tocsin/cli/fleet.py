"""`tocsin fleet`: the workers."""

from typing import Annotated

import typer

from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, connect, noun, page_size
from tocsin.cli.text import pairs, relative, when

app = noun("See and drain the workers.")

WorkerId = Annotated[str, typer.Argument(help="The worker's id.", metavar="WORKER", show_default=False)]


COLUMNS = [
    Column("ID", lambda worker: worker["id"], whole=True),
    Column("NAME", lambda worker: worker.get("name")),
    Column("POOL", lambda worker: worker.get("pool")),
    Column("STATE", lambda worker: worker.get("state"), whole=True),
    Column("RUNNING", lambda worker: worker.get("running"), spare=True),
    Column("SLOTS", lambda worker: worker.get("slots"), spare=True),
    Column("SINCE", lambda worker: relative(worker.get("registered_at"), now())),
    Column("LABELS", lambda worker: pairs(worker.get("labels"))),
]


def _fields(worker: Document) -> Fields:
    yield "id", worker["id"]
    yield "name", worker.get("name") or ""
    yield "pool", worker.get("pool") or ""
    yield "state", worker.get("state") or ""
    yield "running", str(worker.get("running", ""))
    yield "slots", str(worker.get("slots", ""))
    yield "labels", pairs(worker.get("labels"))
    yield "targets", ", ".join(map(str, worker.get("targets") or ()))
    yield "functions", ", ".join(map(str, worker.get("functions") or ()))
    yield "version", worker.get("version") or ""
    yield "registered", when(worker.get("registered_at"), now())
    yield "lease until", when(worker.get("lease_until"), now())
    yield "gone", when(worker.get("gone_at"), now())


@app.command("list")
def list_(limit: Limit = DEFAULT_LIMIT, as_json: Json = False) -> None:
    """List workers."""
    with connect() as client:
        print_list(client.list_workers(limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


@app.command()
def show(worker: WorkerId, as_json: Json = False) -> None:
    """Show one worker."""
    with connect() as client:
        print_document(client.get_worker(worker), _fields, as_json)


@app.command()
def drain(worker: WorkerId, as_json: Json = False) -> None:
    """Give a worker no more runs; it ends when those it has are done."""
    with connect() as client:
        print_done(client.drain_worker(worker), f"draining {worker}", as_json)
