"""Printing: one JSON document for machines; tables for people, in colour at a terminal and plain in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from tocsin.cli.text import json_safe, plain

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Document = dict[str, Any]
Span: TypeAlias = tuple[str, str]  # text, and the style it has at a terminal
Line: TypeAlias = Sequence[Span]
Fields = Iterable[tuple[str, str]]

_GAP, _LEGIBLE, _SHORTEST = 2, 12, 4  # characters between columns, and in a column that is cut

_COLOURS = {
    "active": "green",
    "live": "green",
    "succeeded": "green",
    "running": "cyan",
    "stopping": "yellow",
    "paused": "yellow",
    "waiting": "yellow",
    "draining": "yellow",
    "dead": "red",
    "failed": "red",
    "lost": "red",
    "timeout": "red",
    "expired": "magenta",
    "cancelled": "dim",
    "completed": "dim",
    "skipped": "dim",
    "gone": "dim",
    "ok": "green",
    "warn": "yellow",
    "fail": "red",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title and what stands in it. `whole`: never cut off where the terminal is narrow; `spare`: left
    out there before others are cut too short; `state`: begins with a state, which gives the colour."""

    title: str
    cell: Callable[[Document], object]
    whole: bool = False
    spare: bool = False
    state: bool = False

    def text(self, item: Document) -> str:
        value = self.cell(item)
        return "" if value is None else plain(value)


def now() -> datetime:
    """This machine's clock, for relative times only."""
    return datetime.now(UTC)


def print_json(document: Any, *, indent: int | None = 2) -> None:
    """One JSON document."""
    typer.echo(json_safe(json.dumps(document, ensure_ascii=False, indent=indent)))


def print_document(document: Document, fields: Callable[[Document], Fields], as_json: bool) -> None:
    """One thing: all of it for machines, the given fields for people."""
    if as_json:
        print_json(document)
        return
    shown = [(name, plain(value)) for name, value in fields(document) if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        typer.echo(f"{name:<{width}}  {value}")


def print_done(document: Document, sentence: str, as_json: bool, ids: bool = False) -> None:
    """What a command did: the server's answer for machines, its id for pipes, a sentence for people."""
    if as_json:
        print_json(document)
    elif ids:
        print_ids([document])
    else:
        typer.echo(plain(sentence))


def print_coloured(lines: Iterable[tuple[str, str]]) -> None:
    """Lines, each with the colour it has at a terminal."""
    print_lines([line] for line in lines)


def print_lines(lines: Iterable[Line]) -> None:
    """Lines of several colours at a terminal, as they are; plain in a pipe."""
    if not sys.stdout.isatty():
        for line in lines:
            typer.echo("".join(plain(text) for text, _ in line))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(rich_line(line), soft_wrap=True)


def rich_line(line: Line) -> Text:
    """A line for a terminal, cut off where it is narrower."""
    from rich.text import Text

    text = Text(no_wrap=True)
    for part, style in line:
        text.append(plain(part), style)
    return text


def print_ids(items: Iterable[Document]) -> None:
    """Ids alone, one a line, for other commands to take."""
    for item in items:
        typer.echo(plain(item["id"]))


def print_list(
    found: Iterator[Document], columns: Sequence[Column], *, limit: int, as_json: bool, ids: bool = False
) -> None:
    """At most `limit` things (0: all), and whether there are more."""
    items = list(found if limit == 0 else islice(found, limit))
    more = limit != 0 and next(found, None) is not None
    if as_json:
        print_json({"items": items, "more": more})
        return
    if ids:
        print_ids(items)
    else:
        print_table(items, columns)
    if more:
        typer.echo(f"the first {limit}; more with --limit, all with --limit 0", err=True)


def print_table(items: Sequence[Document], columns: Sequence[Column]) -> None:
    """Rows for people."""
    rows = [[column.text(item) for column in columns] for item in items]
    if not sys.stdout.isatty():
        _print_plain([[column.title for column in columns], *rows])
    elif rows:
        from rich.console import Console

        Console(highlight=False).print(rich_table(columns, rows))
    else:
        typer.echo("none", err=True)


def _print_plain(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())


def rich_table(columns: Sequence[Column], rows: list[list[str]]) -> Table:
    """A table for a terminal, in colour."""
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = zip(*([column.title for column in columns], *rows), strict=True)
    widths = fit(columns, [max(map(cell_len, column)) for column in texts], Console().width)
    shown = [number for number, width in enumerate(widths) if width]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number in shown:
        table.add_column(columns[number].title, no_wrap=True, overflow="ellipsis", width=widths[number])
    for row in rows:
        # Text, not str: a server's "[red]" is a word, not markup.
        cells = ((row[number], columns[number].state) for number in shown)
        table.add_row(*(Text(cell, style=colour(cell.split(" ")[0] if state else cell)) for cell, state in cells))
    return table


def fit(columns: Sequence[Column], widths: Sequence[int], room: int) -> list[int]:
    """How wide each column is shown, 0 for not at all. Those that may be cut are, the widest first."""
    kept = dict(enumerate(widths))

    def over(least: int) -> int:
        """By how much it is too wide if columns are cut to `least`."""
        shown = [w if columns[i].whole or columns[i].spare else min(w, least) for i, w in kept.items()]
        return sum(shown) + _GAP * (len(shown) - 1) - room

    for number in reversed([i for i, column in enumerate(columns) if column.spare]):
        if over(_LEGIBLE) > 0:
            del kept[number]
    long = max(widths, default=0)
    least = next((width for width in range(long, _SHORTEST, -1) if over(width) <= 0), _SHORTEST)
    return [
        0 if i not in kept else w if column.whole or column.spare else min(w, least)
        for i, (column, w) in enumerate(zip(columns, widths, strict=True))
    ]


def colour(word: str) -> str:
    """The colour of a state; none for any other word."""
    return _COLOURS.get(word, "")


@contextmanager
def progress(total: int, verb: str, step: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's standard error; nothing elsewhere, nor for what is done in one step."""
    if not sys.stderr.isatty() or total <= step:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda done: bar.advance(task, done)
