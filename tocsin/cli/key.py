"""`tocsin key`: who may do what."""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

import typer

from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, assignments, connect, noun, page_size
from tocsin.cli.text import instant, local, relative, when
from tocsin.model.access import ROLES

app = noun("Make, rotate and revoke API keys.")

KeyId = Annotated[str, typer.Argument(help="The key's id.", metavar="KEY", show_default=False)]
Patterns = list[str] | None


def _state(key: Document) -> str:
    if key.get("revoked_at"):
        return f"revoked {relative(key['revoked_at'], now())}"
    if not key.get("expires_at"):
        return "active"
    return f"{'expired' if _has_ended(key) else 'expires'} {relative(key['expires_at'], now())}"


def _has_ended(key: Document) -> bool:
    ends: datetime | None = instant(key.get("revoked_at") or key.get("expires_at"))
    return ends is not None and ends <= now()


def _kept_to(key: Document) -> str:
    scopes = key.get("scopes") or {}
    return "; ".join(f"{kind} {', '.join(values)}" for kind, values in scopes.items())


COLUMNS = [
    Column("ID", lambda key: key["id"], whole=True),
    Column("NAME", lambda key: key.get("name")),
    Column("ROLE", lambda key: key.get("role")),
    Column("STATE", _state, state=True),
    Column("KEPT TO", _kept_to),
    Column("LAST USED", lambda key: relative(key.get("last_used_at"), now())),
    Column("CREATED", lambda key: local(key.get("created_at")), spare=True),
]


def _fields(key: Document) -> Fields:
    yield "id", key["id"]
    yield "name", key.get("name") or ""
    yield "role", key.get("role") or ""
    yield "tenant", key.get("tenant") or ""
    yield "kept to", _kept_to(key)
    yield "state", _state(key)
    yield "created", local(key.get("created_at"))
    yield "expires", when(key.get("expires_at"), now())
    yield "last used", when(key.get("last_used_at"), now())
    yield "replaces", key.get("replaces") or ""
    if key.get("old_expires_at"):
        yield "old ends", when(key["old_expires_at"], now())
    yield "key", key.get("key") or ""


def _show_once(key: Document, as_json: bool) -> None:
    print_document(key, _fields, as_json)
    if not as_json:
        typer.echo("keep the key now: it is not shown again", err=True)


@app.command()
def create(
    role: Annotated[
        str, typer.Option(help=" ".join(f"{role}: {words}." for role, words in ROLES.items()), metavar="ROLE")
    ],
    name: Annotated[str, typer.Option(help="What it is for.")] = "",
    job: Annotated[
        Patterns, typer.Option(help="Keep it to jobs whose name fits; * stands for anything.", metavar="PATTERN")
    ] = None,
    tag: Annotated[Patterns, typer.Option(help="Keep it to jobs with this tag.", metavar="NAME=VALUE")] = None,
    pool: Annotated[
        Patterns, typer.Option(help="A pool that a worker with it may serve; else all.", metavar="NAME")
    ] = None,
    serve: Annotated[
        Patterns, typer.Option(help="A tenant that a worker with it may serve; else all.", metavar="SLUG")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="End it by itself: after a time such as 90d, or at an instant.", metavar="WHEN")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a key. It is shown this once."""
    tags = [f"{key}:{value}" for key, value in assignments(tag, "--tag").items()]
    scopes = {"jobs": job, "tags": tags, "pools": pool, "tenants": serve}
    ends = {} if expires is None else {"expires_at" if instant(expires) else "expires_in": expires}
    with connect() as client:
        made = client.create_key(role, name=name, scopes={k: v for k, v in scopes.items() if v}, **ends)
    _show_once(made, as_json)


@app.command("list")
def list_(
    all_: Annotated[bool, typer.Option("--all", help="Also those that have ended.")] = False,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List keys, without their secrets."""
    with connect() as client:
        found: Iterator[Document] = client.list_keys(limit=page_size(limit))
        wanted = (key for key in found if all_ or not _has_ended(key))
        print_list(wanted, COLUMNS, limit=limit, as_json=as_json)


@app.command()
def show(key: KeyId, as_json: Json = False) -> None:
    """Show what a key may do, when it ends, and when it was last used."""
    with connect() as client:
        print_document(client.get_key(key), _fields, as_json)


@app.command()
def rotate(
    key: KeyId,
    overlap: Annotated[
        str | None,
        typer.Option(help="How long the old one stays good, 30 days at most; 0s: not at all.", metavar="TIME"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make another key with the same rights, shown this once. The old one stays good for a day, unless said."""
    with connect() as client:
        made = client.rotate_key(key, overlap=overlap)
    _show_once(made, as_json)


@app.command()
def revoke(key: KeyId, as_json: Json = False) -> None:
    """End a key, on every server within a second."""
    with connect() as client:
        print_done(client.revoke_key(key), f"revoked {key}", as_json)
