"""Printing: one JSON document for machines; tables for people, in colour at a terminal and plain in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import typer

from tocsin.cli.text import json_safe, plain

Document = dict[str, Any]
Fields = Iterable[tuple[str, str]]

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
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, what stands in it, and whether it may be cut off where the terminal is narrow."""

    title: str
    cell: Callable[[Document], object]
    whole: bool = False

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


def print_done(document: Document, sentence: str, as_json: bool) -> None:
    """What a command did: the server's answer for machines, a sentence for people."""
    if as_json:
        print_json(document)
    else:
        typer.echo(plain(sentence))


def print_list(found: Iterator[Document], columns: Sequence[Column], *, limit: int, as_json: bool) -> None:
    """At most `limit` things (0: all), and whether there are more."""
    items = list(found if limit == 0 else islice(found, limit))
    more = limit != 0 and next(found, None) is not None
    if as_json:
        print_json({"items": items, "more": more})
        return
    print_table(items, columns)
    if more:
        typer.echo(f"the first {limit}; more with --limit, all with --limit 0", err=True)


def print_table(items: Sequence[Document], columns: Sequence[Column]) -> None:
    """Rows for people."""
    rows = [[column.text(item) for column in columns] for item in items]
    if not sys.stdout.isatty():
        _print_plain([[column.title for column in columns], *rows])
    elif rows:
        _print_rich(columns, rows)
    else:
        typer.echo("none", err=True)


def _print_plain(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        typer.echo(line.rstrip())


def _print_rich(columns: Sequence[Column], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        widest = max(len(row[number]) for row in rows) if column.whole else None
        table.add_column(column.title, no_wrap=True, overflow="ellipsis", min_width=widest)
    for row in rows:
        # Text, not str: a server's "[red]" is a word, not markup.
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    Console(highlight=False).print(table)
