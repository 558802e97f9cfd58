"""`tocsin circuit`: breakers that jobs share which call the same dependency."""

from typing import Annotated

import typer

from tocsin.cli import jobspec
from tocsin.cli.output import Column, Document, Fields, print_document, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, CircuitState, Json, Limit, Reason, connect, noun, page_size
from tocsin.cli.text import local

app = noun("Look after circuits, which stop jobs from calling what fails.")

Name = Annotated[str, typer.Argument(help="The circuit's name.", metavar="NAME", show_default=False)]
Duration = typer.Option(help="A duration such as 30s.", metavar="DURATION")


def _state(circuit: Document) -> str:
    return f"{circuit['state']} by hand" if circuit["by_hand"] else str(circuit["state"])


def _recent(circuit: Document) -> str:
    return f"{circuit['recent']['failures']} of {circuit['recent']['calls']} failed"


COLUMNS = [
    Column("NAME", lambda circuit: circuit["name"], whole=True),
    Column("STATE", _state),
    Column("SINCE", lambda circuit: local(circuit["since"])),
    Column("WAITING", lambda circuit: str(circuit["waiting"])),
    Column("LAST CALLS", _recent),
]


def _fields(circuit: Document) -> Fields:
    policy = circuit["policy"]
    yield "name", circuit["name"]
    yield "state", _state(circuit)
    yield "since", local(circuit["since"])
    yield "probed at", local(circuit["probes_at"])
    yield "canaries at once", circuit["wave"] and str(circuit["wave"])
    yield "waiting runs", str(circuit["waiting"])
    yield "last calls", _recent(circuit)
    yield "opens at", f"{policy['failure_ratio']:.0%} of {policy['calls']} calls within {policy['window']}"
    yield "stays open", f"{policy['cooldown']}, doubling up to {policy['max_cooldown']}"
    yield "then lets go", f"{policy['release_rate']} a second at most"


@app.command("list")
def list_(
    state: Annotated[CircuitState | None, typer.Option(help="Circuits in this state.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List circuits, by name."""
    with connect() as client:
        print_list(client.list_circuits(state=state, limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show one circuit."""
    with connect() as client:
        print_document(client.get_circuit(name), _fields, as_json)


@app.command("set")
def set_(
    name: Name,
    failure_ratio: Annotated[float | None, typer.Option(help="Opens if so many fail: 0.5 is half.")] = None,
    calls: Annotated[int | None, typer.Option(help="Of so many calls, the last ones.")] = None,
    window: Annotated[str | None, Duration] = None,
    cooldown: Annotated[str | None, Duration] = None,
    max_cooldown: Annotated[str | None, Duration] = None,
    release_rate: Annotated[int | None, typer.Option(help="How many that waited go a second, once it closes.")] = None,
    as_json: Json = False,
) -> None:
    """Set when a circuit opens and for how long; what is left out is as by default."""
    policy = jobspec.compact(
        failure_ratio=failure_ratio,
        calls=calls,
        window=window,
        cooldown=cooldown,
        max_cooldown=max_cooldown,
        release_rate=release_rate,
    )
    with connect() as client:
        print_document(client.put_circuit(name, policy), _fields, as_json)


@app.command("open")
def open_(name: Name, reason: Reason = "", as_json: Json = False) -> None:
    """Let no run that uses it start, until it is closed by hand."""
    with connect() as client:
        print_done(client.open_circuit(name, reason), f"opened {name}; `tocsin circuit close {name}` ends it", as_json)


@app.command()
def close(name: Name, reason: Reason = "", as_json: Json = False) -> None:
    """Let runs that use it start again; those that waited go in growing waves."""
    with connect() as client:
        answer = client.close_circuit(name, reason)
    print_done(answer, f"closed {name}; {answer['waiting']} runs that waited go in waves", as_json)
