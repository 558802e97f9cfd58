"""Graphs as text: a column for each layer, lines from what comes first to what waits for it.

    ✓ extract 2 s ─┬─► ✓ clean 1 s ─┬─► ● load 3/10 ─► · report
                   ╰─► ✓ check 2 s ─╯

Lines that touch belong together: all on their left lead to all on their right. So jobs with the same children share one
line, and a job where several of these end has a row for each. A line that only passes another is broken by it: `─│─`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from tocsin.cli.output import Line, Span

MOST_DRAWN = 120  # jobs; of more nobody sees which is which
_NARROWEST = 6  # characters that a layer takes at least
# To how many characters names are cut, and whether something stands behind them: the first that fits.
_LABELS = ((64, True), (32, True), (20, True), (64, False), (32, False), (20, False), (12, False))


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What lines are drawn with. `bends`: by the arms that a place has, of up, down, left and right."""

    bends: Mapping[str, str]
    arrow: str
    cut: str
    brackets: str  # the first, the inner and the last row of one that has several


UNICODE = Glyphs(
    {"lr": "─", "ud": "│", "dr": "╭", "ur": "╰", "dl": "╮", "ul": "╯"}
    | {"udr": "├", "udl": "┤", "dlr": "┬", "ulr": "┴", "udlr": "┼"},
    arrow="►",
    cut="…",
    brackets="╭│╰",
)
ASCII = Glyphs(
    {"lr": "-", "ud": "|"} | dict.fromkeys(("dr", "ur", "dl", "ul", "udr", "udl", "dlr", "ulr", "udlr"), "+"),
    arrow=">",
    cut="~",
    brackets="/|\\",
)


@dataclass(frozen=True, slots=True)
class Job:
    """One to draw: its mark, its name, which is cut where there is no room, and what stands behind that."""

    name: str
    layer: int
    mark: str = ""
    tail: str = ""
    style: str = ""

    def label(self, longest: int = 64, cut: str = "", with_tail: bool = True) -> str:
        """Mark, name and tail."""
        name = self.name if len(self.name) <= longest else self.name[: longest - 1] + cut
        return " ".join(part for part in (self.mark, name, self.tail if with_tail else "") if part)


@dataclass(eq=False, slots=True)
class _Cell:
    """A job, or (none) a line on its way through the column of a layer, from its first row on."""

    job: Job | None
    ins: list[_Net] = field(default_factory=list)
    out: _Net | None = None
    row: int = 0


@dataclass(eq=False, slots=True)
class _Net:
    """One line between two columns. `after`: those that must turn further to the right."""

    lefts: list[_Cell]
    rows: set[int] = field(default_factory=set)
    after: list[_Net] = field(default_factory=list)
    track: int = -1  # where it goes up and down; nowhere if it is straight

    @property
    def top(self) -> int:
        return min(self.rows)

    @property
    def bottom(self) -> int:
        return max(self.rows)

    def leads_to(self, other: _Net) -> bool:
        """Whether `other` must turn further to the right."""
        seen, open_ = {self}, [self]
        while open_:
            for net in open_.pop().after:
                if net is other:
                    return True
                if net not in seen:
                    seen.add(net)
                    open_.append(net)
        return False


def draw(
    jobs: Sequence[Job], edges: Iterable[tuple[str, str]], width: int, glyphs: Glyphs = UNICODE
) -> list[Line] | None:
    """The graph in lines of at most `width` characters; None if it is too large for that. `edges`: (from, to)."""
    depth = 1 + max((job.layer for job in jobs), default=-1)
    if len(jobs) > MOST_DRAWN or depth * _NARROWEST > width:
        return None
    layers, gutters = _cells(jobs, edges, depth)
    for number, cell in enumerate(layers[0] if layers else ()):
        cell.row = number
    for before, cells, nets in zip(layers, layers[1:], gutters, strict=False):
        _place(before, cells)
        _lay(before, nets)
    for longest, with_tail in _LABELS:
        label = partial(Job.label, longest=longest, cut=glyphs.cut, with_tail=with_tail)
        picture = _Picture(layers, gutters, label, glyphs)
        if picture.width <= width:
            return picture.lines()
    return None


def _cells(
    jobs: Sequence[Job], edges: Iterable[tuple[str, str]], depth: int
) -> tuple[list[list[_Cell]], list[list[_Net]]]:
    """What stands in each column, and the lines behind each; a line that goes further passes through the next."""
    cells = {job.name: _Cell(job) for job in jobs}
    layers: list[list[_Cell]] = [[] for _ in range(depth)]
    gutters: list[list[_Net]] = [[] for _ in range(depth)]
    children: dict[str, set[str]] = {job.name: set() for job in jobs}
    for parent, child in edges:
        children[parent].add(child)
    bundles: dict[tuple[int, frozenset[str]], list[_Cell]] = {}
    for job in jobs:
        layers[job.layer].append(cells[job.name])
        bundles.setdefault((job.layer, frozenset(children[job.name])), []).append(cells[job.name])
    for (layer, names), lefts in bundles.items():
        ends = [cells[job.name] for job in jobs if job.name in names]
        while ends:
            net = _Net(lefts)
            gutters[layer].append(net)
            for cell in lefts:
                cell.out = net
            layer += 1
            rights = [cell for cell in ends if cell.job is not None and cell.job.layer == layer]
            ends = [cell for cell in ends if cell not in rights]
            if ends:
                lefts = [_Cell(None)]
                layers[layer] += lefts
                rights += lefts
            for cell in rights:
                cell.ins.append(net)
    return layers, gutters


def _place(before: Sequence[_Cell], cells: list[_Cell]) -> None:
    """Find a row for each of a column: beside what leads to it, as far as lines can then be told apart."""
    leaving = {cell.row: cell.out for cell in before if cell.out is not None}
    for cell in cells:
        cell.ins.sort(key=lambda net: min(left.row for left in net.lefts))

    def middle(cell: _Cell) -> float:
        rows = [left.row for net in cell.ins for left in net.lefts]
        return sum(rows) / len(rows)

    cells.sort(key=middle)
    free = 0
    for cell in cells:
        wanted = min(left.row for left in cell.ins[0].lefts)
        for row in count(max(free, wanted)):
            # A line that comes from the left in a row must have turned before one begins there that leads on.
            meeting = [(leaving.get(row + n), net) for n, net in enumerate(cell.ins)]
            pairs = [(first, then) for first, then in meeting if first is not None and first is not then]
            for number, (first, then) in enumerate(pairs):
                if then.leads_to(first):
                    for done, _ in pairs[:number]:
                        done.after.pop()
                    break
                first.after.append(then)
            else:
                cell.row, free = row, row + len(cell.ins)
                for n, net in enumerate(cell.ins):
                    net.rows.add(row + n)
                break


def _lay(before: Sequence[_Cell], nets: Sequence[_Net]) -> None:
    """Say where each line goes up and down: as far left as those before it and beside it let it."""
    for cell in before:
        if cell.out is not None:
            cell.out.rows.add(cell.row)
    missing = {net: 0 for net in nets}
    for net in nets:
        for other in net.after:
            missing[other] += 1
    free = [net for net in nets if not missing[net]]
    laid: list[_Net] = []
    for net in free:  # grows while it is read
        if net.top < net.bottom:
            least = 1 + max((other.track for other in laid if net in other.after), default=-1)
            taken = {o.track for o in laid if o.top <= net.bottom and net.top <= o.bottom}
            net.track = next(track for track in count(least) if track not in taken)
            laid.append(net)
        for other in net.after:
            missing[other] -= 1
            if not missing[other]:
                free.append(other)


class _Picture:
    """What was placed, as text with these labels."""

    def __init__(
        self,
        layers: Sequence[Sequence[_Cell]],
        gutters: Sequence[Sequence[_Net]],
        label: Callable[[Job], str],
        glyphs: Glyphs,
    ) -> None:
        self._layers, self._gutters, self._label_of, self._glyphs = layers, gutters, label, glyphs
        self._widths = [max(len(self._label(cell, 0)) for cell in cells) for cells in layers]
        self._tracks = [1 + max((net.track for net in nets), default=-1) for nets in gutters]

    @property
    def width(self) -> int:
        """Of the whole: each column, and between two of them a space, a line, its bends, an arrow and a space."""
        return sum(self._widths) + sum(4 + 2 * tracks for tracks in self._tracks[:-1])

    def lines(self) -> list[Line]:
        """Row by row."""
        where = [
            {cell.row + n: (cell, n) for cell in cells for n in range(max(1, len(cell.ins)))} for cells in self._layers
        ]
        height = 1 + max((row for rows in where for row in rows), default=-1)
        return [self._line(row, [rows.get(row) for rows in where]) for row in range(height)]

    def _line(self, row: int, found: Sequence[tuple[_Cell, int] | None]) -> Line:
        line: list[Span] = []
        for layer, place in enumerate(found):
            line += self._column(layer, place)
            if layer + 1 < len(found):
                line.append((self._gutter(layer, row, place, found[layer + 1]), "dim"))
        while line and not line[-1][0].strip():
            line.pop()
        return [*line[:-1], (line[-1][0].rstrip(), line[-1][1])] if line else line

    def _column(self, layer: int, place: tuple[_Cell, int] | None) -> Line:
        width = self._widths[layer]
        if place is None:
            return [(" " * (width + 1), "")]
        cell, nth = place
        dash = self._glyphs.bends["lr"]
        if cell.job is None:
            return [(dash * (width + 1), "dim")]
        text = self._label(cell, nth)
        is_left = cell.out is not None and nth == 0
        rest = f" {dash * (width - len(text))}" if is_left else " " * (width + 1 - len(text))
        return [(text, cell.job.style), (rest, "dim")]

    def _label(self, cell: _Cell, nth: int) -> str:
        if cell.job is None:
            return ""
        rows, brackets = len(cell.ins), self._glyphs.brackets
        if nth:
            return brackets[2 if nth == rows - 1 else 1]
        return (f"{brackets[0]} " if rows > 1 else "") + self._label_of(cell.job)

    def _gutter(self, layer: int, row: int, left: tuple[_Cell, int] | None, right: tuple[_Cell, int] | None) -> str:
        """What stands between two columns in a row."""
        first = left[0].out if left is not None and left[1] == 0 else None
        then = right[0].ins[right[1]] if right is not None else None
        upright = {net.track: net for net in self._gutters[layer] if net.track >= 0 and net.top <= row <= net.bottom}
        dash = self._glyphs.bends["lr"]
        straight = first is not None and first is then and first.track < 0
        text = dash if first is not None else " "
        for track in range(self._tracks[layer]):
            net = upright.get(track)
            on_the_way = straight or (first is not None and track < first.track)
            leads_on = straight or (then is not None and track > then.track)
            arms = "" if net is None else self._arms(net, row, first, then)
            text += self._glyphs.bends[arms] if arms else dash if on_the_way or leads_on else " "
            text += dash if on_the_way or leads_on or (net is then and net is not None) else " "
        if then is None:
            return text + "  "
        assert right is not None
        return text + (dash * 2 if right[0].job is None else f"{self._glyphs.arrow} ")

    @staticmethod
    def _arms(net: _Net, row: int, first: _Net | None, then: _Net | None) -> str:
        """Up, down, left, right: what a line that goes up and down has in a row. One that passes it is broken off."""
        up, down = row > net.top, row < net.bottom
        return "u" * up + "d" * down + "l" * (net is first) + "r" * (net is then)
