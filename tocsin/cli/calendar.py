"""`tocsin calendar`: days that schedules leave out, move past, or keep to."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tocsin.cli import jobspec
from tocsin.cli.output import Column, Document, Fields, print_document, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, IfMatch, Json, Limit, connect, noun, page_size
from tocsin.cli.text import local

app = noun("Keep calendars that schedules go by.")

Name = Annotated[str, typer.Argument(help="The calendar's name.", metavar="NAME", show_default=False)]
Mode = Annotated[
    str | None,
    typer.Option(help="What becomes of occurrences on its days: skip (the default), next_business_day, or only these."),
]

COLUMNS = [
    Column("NAME", lambda calendar: calendar["name"], whole=True),
    Column("MODE", lambda calendar: calendar["mode"]),
    Column("WEEKDAYS", lambda calendar: " ".join(calendar["weekdays"])),
    Column("DAYS", lambda calendar: str(len(calendar["days"]))),
    Column("UPDATED", lambda calendar: local(calendar["updated_at"])),
]


def _fields(calendar: Document) -> Fields:
    yield "name", calendar["name"]
    yield "version", str(calendar["version"])
    yield "mode", calendar["mode"]
    yield "weekdays", " ".join(calendar["weekdays"])
    yield "days", " ".join(calendar["days"])
    yield "created", local(calendar["created_at"])
    yield "updated", local(calendar["updated_at"])


@app.command()
def put(
    name: Name,
    day: Annotated[list[str] | None, typer.Option(help="A day, again for more.", metavar="YYYY-MM-DD")] = None,
    weekday: Annotated[list[str] | None, typer.Option(help="MON to SUN, again for more.", metavar="DAY")] = None,
    mode: Mode = None,
    if_match: IfMatch = None,
    as_json: Json = False,
) -> None:
    """Make a calendar, or make it another. Its jobs follow."""
    given = jobspec.compact(mode=mode, days=day, weekdays=[each.upper() for each in weekday or ()])
    with connect() as client:
        print_document(client.put_calendar(name, given, if_match=if_match), _fields, as_json)


@app.command("import")
def import_(
    name: Name,
    file: Annotated[str, typer.Argument(help="An iCalendar file; - reads standard input.", metavar="FILE")],
    mode: Mode = None,
    if_match: IfMatch = None,
    as_json: Json = False,
) -> None:
    """Make a calendar of the days that the events of an iCalendar file touch."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}") from None
    with connect() as client:
        answer = client.put_calendar(name, jobspec.compact(ical=text, mode=mode), if_match=if_match)
    print_done(answer, f"calendar {answer['name']} has {len(answer['days'])} days", as_json)


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """Show one calendar."""
    with connect() as client:
        print_document(client.get_calendar(name), _fields, as_json)


@app.command("list")
def list_(limit: Limit = DEFAULT_LIMIT, as_json: Json = False) -> None:
    """List calendars, by name."""
    with connect() as client:
        print_list(client.list_calendars(limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


@app.command()
def delete(name: Name, if_match: IfMatch = None, as_json: Json = False) -> None:
    """Delete a calendar that no open job goes by."""
    with connect() as client:
        print_done(client.delete_calendar(name, if_match=if_match), f"deleted {name}", as_json)
