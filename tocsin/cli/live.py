"""What goes on: lists and progress, drawn again in place at a terminal, told in few lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import typer

from tocsin.cli.output import Column, Document, Line, print_json, rich_line, rich_table
from tocsin.cli.text import plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

WATCH_SECONDS = 1.0
_ROWS_BESIDE = 3  # the head, the line below, and the one the cursor is left on

Fetch = Callable[[int], Sequence[Document]]
T = TypeVar("T")


class Changes:
    """Tells what is new or changed between one reading of a list and the next; rows by their `id`, oldest first."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._seen: dict[str, tuple[Any, ...]] = {}
        self._widths = [len(column.title) for column in columns]
        self._begun = False

    def of(self, items: Sequence[Document]) -> list[Document]:
        """What was not there before, or had another state or attempt."""
        now = {str(item["id"]): (item.get("state"), item.get("attempt")) for item in items}
        found = [item for item in reversed(items) if self._seen.get(str(item["id"])) != now[str(item["id"])]]
        # Those that left the list may come back into it, when a filter or the limit lets them; they are no news then.
        self._seen |= now
        while len(self._seen) > 20_000:
            del self._seen[next(iter(self._seen))]
        return found

    def print(self, items: Sequence[Document], *, as_json: bool) -> None:
        """One line for each change."""
        found = self.of(items)
        if as_json:
            for item in found:
                print_json(item, indent=None)
            return
        rows = [[column.text(item) for column in self._columns] for item in found]
        if not self._begun:
            rows.insert(0, [column.title for column in self._columns])
            self._begun = True
        for row in rows:
            self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, row, strict=True)]
        for row in rows:
            padded = (f"{cell:<{width}}" for cell, width in zip(row, self._widths, strict=True))
            typer.echo("  ".join(padded).rstrip())
        sys.stdout.flush()


def watch(fetch: Fetch, columns: Sequence[Column], *, limit: int, as_json: bool) -> None:
    """Show a list until Ctrl-C. `fetch` answers at most so many of its items, newest first."""
    source: _Patient[Sequence[Document]] = _Patient()
    if as_json or not sys.stdout.isatty():
        changes, told = Changes(columns), ""
        while True:
            changes.print(source.read(partial(fetch, limit or 500)), as_json=as_json)
            if source.trouble and source.trouble != told:
                typer.echo(f"tocsin: {source.trouble}", err=True)
            told = source.trouble
            time.sleep(WATCH_SECONDS)
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as screen:
        while True:
            room = max(1, console.height - _ROWS_BESIDE)
            items = source.read(partial(fetch, min(limit or room, room)))
            screen.update(picture(items, columns, source.trouble), refresh=True)
            time.sleep(WATCH_SECONDS)


class Step(NamedTuple):
    """How far something is: so much of so much, if anybody knows; in words, and whether that is the end."""

    done: int
    total: int | None
    words: str
    ended: bool


def follow(fetch: Callable[[], Document], step: Callable[[Document], Step], title: str) -> Document:
    """Read a document until it says that it has ended; a bar on a terminal's standard error shows how far it is."""
    source: _Patient[Document] = _Patient()
    if not sys.stderr.isatty():
        while not step(document := source.read(fetch)).ended:
            time.sleep(WATCH_SECONDS)
        return document
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.fields[words]}", markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), words)
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(plain(title), total=None, words="")
        while True:
            document = source.read(fetch)
            now = step(document)
            far = "" if now.total is None else f"{now.done}/{now.total} "
            bar.update(task, completed=now.done, total=now.total, words=far + plain(source.trouble or now.words))
            if now.ended:
                return document
            time.sleep(WATCH_SECONDS)


def follow_drawn(
    fetch: Callable[[], Document],
    draw: Callable[[Document, int, int], Sequence[Line]],
    news: Callable[[Document], Iterable[str]],
    ended: Callable[[Document], bool],
    pause: Callable[[Document], float],
) -> Document:
    """Read a document until it has ended. At a terminal it is drawn in place, for so many columns and rows; elsewhere
    each piece of news is a line."""
    source: _Patient[Document] = _Patient()
    if not sys.stdout.isatty():
        while True:
            document = source.read(fetch)
            for line in news(document):
                typer.echo(plain(f"{time.strftime('%H:%M:%S')}  {line}"))
            sys.stdout.flush()
            if ended(document):
                return document
            time.sleep(pause(document))
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(highlight=False)
    # Nobody prints meanwhile, and `draw` may ask what standard output can show.
    with Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stdout=False) as screen:
        while True:
            document = source.read(fetch)
            over = ended(document)
            lines = [rich_line(line) for line in draw(document, console.width, max(1, console.height - _ROWS_BESIDE))]
            screen.update(Group(*lines, *([] if over else [_below(source.trouble)])), refresh=True)
            if over:
                return document
            time.sleep(pause(document))


class _Patient(Generic[T]):
    """Reads the same again and again; a server that is away for a while is waited for, unless it never was there."""

    def __init__(self) -> None:
        self._last: T | None = None
        self.trouble = ""

    def read(self, fetch: Callable[[], T]) -> T:
        """What is there now, or was there last."""
        from tocsin.client.core import Unreachable

        try:
            self._last, self.trouble = fetch(), ""
        except Unreachable as error:
            if self._last is None:
                raise
            self.trouble = plain(f"{error}; trying again")
        return self._last


def picture(items: Sequence[Document], columns: Sequence[Column], trouble: str = "") -> RenderableType:
    """The list as it is now, with the time, how to leave, and what keeps it from being newer."""
    from rich.console import Group

    rows = [[column.text(item) for column in columns] for item in items]
    return Group(rich_table(columns, rows), _below(trouble))


def _below(trouble: str) -> Text:
    return rich_line([(f"{time.strftime('%H:%M:%S')}  Ctrl-C ends", "dim"), (f"  {trouble}".rstrip(), "red")])
