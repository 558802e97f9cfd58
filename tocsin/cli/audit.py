"""`tocsin audit`: who did what, and proof that nobody has touched what it says."""

import json
import sys
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tocsin.cli.output import Column, Document, print_json, print_list, progress
from tocsin.cli.shared import DEFAULT_LIMIT, REFUSED, Json, Limit, connect, noun, page_size
from tocsin.cli.text import json_safe, local, plain
from tocsin.model.tables import as_csv

if TYPE_CHECKING:
    from tocsin.client.sync import Client

app = noun("Read the audit: who did what; prove that nobody has touched it; hand it to others.")

Actor = Annotated[str | None, typer.Option(help="Only what this caller did.", metavar="key:NAME")]
Action = Annotated[str | None, typer.Option(help="Only this, such as job.create.", metavar="ACTION")]
Target = Annotated[str | None, typer.Option(help="Only what was done to this, such as job:ID.", metavar="TARGET")]
From = Annotated[str | None, typer.Option("--from", help="Only from this time on.", metavar="TIME")]
To = Annotated[str | None, typer.Option("--to", help="Only before this time.", metavar="TIME")]

COLUMNS = [
    Column("NUMBER", lambda record: record["seq"], whole=True),
    Column("WHEN", lambda record: local(record["at"]), whole=True),
    Column("WHO", lambda record: record["actor"]),
    Column("WHAT", lambda record: record["action"], whole=True),
    Column("TO", lambda record: record["target"]),
    Column("FROM", lambda record: record["address"], spare=True),
    Column("DETAIL", lambda record: record["detail"] and json.dumps(record["detail"]), spare=True),
]
_FIELDS = (
    *("seq", "at", "actor", "key_id", "action", "target", "detail", "before", "after", "address", "request_id"),
    "hash",
)


@app.command("list")
def list_(
    actor: Actor = None,
    action: Action = None,
    target: Target = None,
    from_: From = None,
    to: To = None,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List what calls have changed, newest first."""
    with connect() as client:
        found = client.list_audit(actor=actor, action=action, target=target, from_=from_, to=to, limit=page_size(limit))
        print_list(found, COLUMNS, limit=limit, as_json=as_json)


@app.command()
def export(
    actor: Actor = None,
    action: Action = None,
    target: Target = None,
    from_: From = None,
    to: To = None,
    format_: Annotated[
        Literal["ndjson", "csv"], typer.Option("--format", help="A JSON document a line, or CSV with a header.")
    ] = "ndjson",
) -> None:
    """Write records to standard output as they come, newest first."""
    write = _write_csv if format_ == "csv" else _write_ndjson
    with connect() as client:
        write(_counted(client.list_audit(actor=actor, action=action, target=target, from_=from_, to=to, limit=500)))


def _counted(records: Iterator[Document]) -> Iterator[Document]:
    """The same, with a bar: numbers have no gaps, so the first one says how far it is."""
    first = next(records, None)
    if first is None:
        return
    with progress(first["seq"], "exported", 500) as advance:
        last = first["seq"] + 1
        for record in chain([first], records):
            yield record
            advance(last - record["seq"])
            last = record["seq"]


def _write_ndjson(records: Iterator[Document]) -> None:
    for record in records:
        print_json(record, indent=None)


def _write_csv(records: Iterator[Document]) -> None:
    sys.stdout.write(as_csv(_FIELDS, ()))
    for record in records:
        detail = record["detail"] and json_safe(json.dumps(record["detail"]))
        sys.stdout.write(as_csv(_FIELDS, [record | {"detail": detail}], header=False))


@app.command()
def verify(as_json: Json = False) -> None:
    """Prove the whole chain, record by record and against the anchors; exit code 1 if anybody has touched it."""
    with connect() as client:
        pieces = list(_pieces(client))
    findings = [finding for piece in pieces for finding in piece["findings"]]
    lost = [one for piece in pieces for one in piece["lost_by_restores"]]
    if as_json:
        counts = {name: sum(piece[name] for piece in pieces) for name in ("checked", "anchors", "signed_anchors")}
        names = ("records", "unsealed", "anchored_seq", "anchored_at", "expired_seq", "expired_days")
        last = {name: pieces[-1].get(name) for name in names}
        print_json({"ok": not findings, "findings": findings, "lost_by_restores": lost} | counts | last)
    else:
        for finding in findings:
            typer.echo(plain(f"{finding['kind']}: {finding['what']}"))
        for one in lost:
            typer.echo(plain(f"restored: record {one['seq']}, there at {local(one['anchored_at'])}, was given up"))
        _print_outcome(pieces, findings)
    if findings:
        raise typer.Exit(REFUSED)


def _pieces(client: "Client") -> Iterator[Document]:
    """Piece by piece, with a bar that knows the end since the first."""
    piece = client.verify_audit()
    with progress(piece["records"], "proved", piece["checked"]) as advance:
        advance(piece["checked"])
        yield piece
        while piece["next_cursor"] is not None:
            piece = client.verify_audit(cursor=piece["next_cursor"])
            advance(piece["checked"])
            yield piece


def _print_outcome(pieces: list[Document], findings: list[Document]) -> None:
    checked, anchors = (sum(piece[name] for piece in pieces) for name in ("checked", "anchors"))
    last = pieces[-1]
    upto = f", up to record {last['anchored_seq']} at {local(last['anchored_at'])}" if last["anchored_seq"] else ""
    if last.get("expired_seq"):
        kept = f"{last['expired_days']} days" if last.get("expired_days") else "they were"
        typer.echo(f"records up to {last['expired_seq']} were not to be kept for longer than {kept}, and are gone")
    outcome = f"{len(findings)} things are wrong" if findings else "nobody has touched them"
    typer.echo(plain(f"{checked} records, held to {anchors} anchors{upto}: {outcome}"))
