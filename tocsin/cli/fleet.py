"""`tocsin fleet`: the workers."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_list, progress
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, connect, noun, page_size
from tocsin.cli.text import pairs, relative, when

if TYPE_CHECKING:
    from tocsin.client import Client

app = noun("See and drain the workers.")

_LOOK_SECONDS = 0.3

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
    resources = worker.get("resources") or {}
    for name, most in (resources.get("total") or {}).items():
        yield name, f"{resources['free'][name]:g} free of {most:g}"
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
def drain(
    workers: Annotated[
        list[str] | None, typer.Argument(help="Ids of workers.", metavar="[WORKER]...", show_default=False)
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="All workers.")] = False,
    pool: Annotated[str | None, typer.Option(help="All workers of a pool.", metavar="NAME")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they are gone.")] = False,
    as_json: Json = False,
) -> None:
    """Give workers no more runs; each ends when those it has are done, or are killed at the end of its grace."""
    if sum((bool(workers), everyone, pool is not None)) != 1:
        raise typer.BadParameter("name the workers, or say --all, or --pool NAME")
    with connect() as client:
        chosen = workers or [
            w["id"] for w in client.list_workers() if w["state"] != "gone" and pool in (None, w["pool"])
        ]
        told = [client.drain_worker(worker) for worker in chosen]
        if wait:
            told = _until_gone(client, chosen)
    verb = "drained" if wait else "draining"
    if workers and len(told) == 1:
        print_done(told[0], f"{verb} {workers[0]}", as_json)
    else:
        print_done({"items": told}, f"{verb} {len(told)} worker{'' if len(told) == 1 else 's'}", as_json)


def _until_gone(client: "Client", workers: list[str]) -> list[Document]:
    """Their documents, once they have left or were lost."""
    gone: dict[str, Document] = {}
    with progress(len(workers), "draining", step=0) as advance:
        while True:
            for worker in workers:
                if worker not in gone and (found := client.get_worker(worker))["state"] == "gone":
                    gone[worker] = found
                    advance(1)
            if len(gone) == len(workers):
                return list(gone.values())
            time.sleep(_LOOK_SECONDS)
