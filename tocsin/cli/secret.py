"""`tocsin secret`: values that jobs are given and nobody can read back."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tocsin.cli.output import Column, Document, Fields, print_document, print_done, print_json, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, IfMatch, Json, Limit, connect, noun, page_size
from tocsin.cli.text import local

app = noun("Keep secrets that jobs are given.")

Name = Annotated[str, typer.Argument(help="The secret's name.", metavar="NAME", show_default=False)]

COLUMNS = [
    Column("NAME", lambda secret: secret["name"], whole=True),
    Column("VERSION", lambda secret: str(secret["version"])),
    Column("UPDATED", lambda secret: local(secret["updated_at"])),
]


def _fields(secret: Document) -> Fields:
    yield "name", secret["name"]
    yield "version", str(secret["version"])
    yield "created", local(secret["created_at"])
    yield "updated", local(secret["updated_at"])


@app.command("set")
def set_(
    name: Name,
    file: Annotated[
        str | None, typer.Option("--file", help="Take all of this file, as it is; - reads standard input.")
    ] = None,
    if_match: IfMatch = None,
    as_json: Json = False,
) -> None:
    """Store a value: the first line of standard input (asked for at a terminal), or a file. Never an argument, for
    those are seen by every process of the machine."""
    value = _value(file)
    with connect() as client:
        print_document(client.put_secret(name, value, if_match=if_match), _fields, as_json)


def _value(file: str | None) -> str:
    try:
        if file is not None:
            return sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from None
    if sys.stdin.isatty():
        return str(typer.prompt("value", hide_input=True, confirmation_prompt=True))
    return sys.stdin.readline().rstrip("\r\n")


@app.command("list")
def list_(limit: Limit = DEFAULT_LIMIT, as_json: Json = False) -> None:
    """List secrets, by name; their values are not told."""
    with connect() as client:
        print_list(client.list_secrets(limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


@app.command()
def rm(name: Name, if_match: IfMatch = None, as_json: Json = False) -> None:
    """Delete a secret; runs of jobs that name it fail from now on."""
    with connect() as client:
        print_done(client.delete_secret(name, if_match=if_match), f"deleted {name}", as_json)


@app.command()
def keys(as_json: Json = False) -> None:
    """List the master keys of the server, and how much each of them wraps."""
    with connect() as client:
        found = client.list_master_keys()
    if as_json:
        print_json(found)
        return
    for key in found["items"]:
        state = "seals" if key["seals"] else "unseals" if key["known"] else "is MISSING on the server"
        typer.echo(f"{key['id']}  {state}; wraps {key['secrets']} secrets and {key['data_keys']} keys of tenants")


@app.command()
def rotate(as_json: Json = False) -> None:
    """Wrap all keys with the server's first master key. Can be interrupted, and goes on where it was."""
    total = 0
    with connect() as client:
        while (done := client.rotate_master_key())["rewrapped"]:
            total += done["rewrapped"]
            if not as_json:
                typer.echo(f"{total} wrapped anew, {done['remaining']} to go", err=True)
    left = done["remaining"]
    print_done({"rewrapped": total, "remaining": left}, _summary(total, left), as_json)
    if left:
        raise typer.Exit(1)


def _summary(total: int, left: int) -> str:
    if left:
        return f"{total} wrapped anew; {left} are wrapped with keys that the server lacks: see `tocsin secret keys`"
    return f"{total} wrapped anew; older master keys may go"
