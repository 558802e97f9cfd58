"""`tocsin key`: who may do what."""

from typing import Annotated

import typer

from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, connect, noun, page_size
from tocsin.cli.text import local, relative

app = noun("Make and revoke API keys.")


def _state(key: Document) -> str:
    if key.get("revoked_at"):
        return f"revoked {relative(key['revoked_at'], now())}"
    return f"expires {relative(key['expires_at'], now())}" if key.get("expires_at") else "active"


COLUMNS = [
    Column("ID", lambda key: key["id"], whole=True),
    Column("NAME", lambda key: key.get("name")),
    Column("ROLE", lambda key: key.get("role")),
    Column("STATE", _state),
    Column("CREATED", lambda key: local(key.get("created_at"))),
]


def _fields(key: Document) -> Fields:
    yield "id", key["id"]
    yield "name", key.get("name") or ""
    yield "role", key.get("role") or ""
    yield "tenant", key.get("tenant") or ""
    yield "key", key.get("key") or ""


@app.command()
def create(
    role: Annotated[str, typer.Option(help="viewer, operator, editor, admin, worker or platform.")],
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    as_json: Json = False,
) -> None:
    """Make a key. It is shown this once."""
    with connect() as client:
        print_document(client.create_key(role, name=name), _fields, as_json)
    if not as_json:
        typer.echo("keep the key now: it is not shown again", err=True)


@app.command("list")
def list_(limit: Limit = DEFAULT_LIMIT, as_json: Json = False) -> None:
    """List keys, without their secrets."""
    with connect() as client:
        print_list(client.list_keys(limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(help="The key's id.", metavar="KEY", show_default=False)], as_json: Json = False
) -> None:
    """End a key at once."""
    with connect() as client:
        print_done(client.revoke_key(key), f"revoked {key}", as_json)
