"""`tocsin events`: what changes, as it changes."""

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.cli.output import Document, colour, print_json
from tocsin.cli.shared import Limit, connect, find_job_id
from tocsin.cli.text import local, plain

if TYPE_CHECKING:
    from tocsin.client.stream import Event

_ABOUT = {
    "open": "listening; Ctrl-C ends",
    "reset": "some events were missed: what changed meanwhile stands in the lists",
}


class Subject(StrEnum):
    """What events are about."""

    run = "run"
    job = "job"
    circuit = "circuit"


def events(
    type: Annotated[Subject | None, typer.Option(help="Only those about this.", metavar="run|job|circuit")] = None,
    job: Annotated[str | None, typer.Option(help="Only those of this job, by id or name.", metavar="JOB")] = None,
    after: Annotated[
        str | None, typer.Option(help="Go on behind the event with this cursor.", metavar="CURSOR")
    ] = None,
    limit: Limit = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON document a line, with the cursor to go on from.")
    ] = False,
) -> None:
    """Tell what becomes of runs, jobs and circuits as it happens, one line each, until Ctrl-C."""
    with connect() as client:
        job_id = None if job is None else find_job_id(client, job)
        found = client.events(type=type and type.value, job=job_id, after=after)
        tell = _tell_machines if as_json else _teller_for_people()
        left = limit
        for event in found:
            tell(event)
            left -= event.kind not in _ABOUT
            if limit and left == 0:
                return


def _tell_machines(event: "Event") -> None:
    print_json({"cursor": event.id, **event.data}, indent=None)


def _teller_for_people() -> "Callable[[Event], None]":
    if not sys.stdout.isatty():
        return lambda event: _tell(event, typer.echo)
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    return lambda event: _tell(event, lambda line: console.print(Text(line, style=colour(event.data.get("state", "")))))


def _tell(event: "Event", say: Callable[[str], object]) -> None:
    if event.kind in _ABOUT:
        typer.echo(_ABOUT[event.kind], err=True)
    else:
        say(_line(event.data))


def _line(told: Document) -> str:
    """When, what, and of whom; then what explains it."""
    attempt = f"try {told['attempt']}" if told.get("attempt") else ""
    version = f"v{told['version']}" if told.get("version") else ""
    blocked = f"blocked by {told['blocked_by']}" if told.get("blocked_by") else ""
    of = f"job {told['job_id']}" if told.get("job_id") else ""
    parts = [of, told.get("name"), version, attempt, told.get("outcome"), told.get("reason"), blocked]
    head = f"{local(told.get('at'))}  {told.get('type', ''):<13}  {told.get('id', '')}"
    return plain("  ".join([head, *(str(part) for part in parts if part)]))
