"""Graphs as text: what is drawn can be read back, by anybody who follows the lines."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.cli.drawing import ASCII, MOST_DRAWN, UNICODE, Job, draw
from tocsin.model.graph import Dependency, Graph

Parents = dict[str, list[str]]
UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
ARMS = {glyph: arms for arms, glyph in UNICODE.bends.items()}
WAYS = {"u": UP, "d": DOWN, "l": LEFT, "r": RIGHT}
DIAMOND: Parents = {"extract": [], "clean": ["extract"], "check": ["extract"], "load": ["clean", "check"]}


def drawn(parents: Parents, width: int = 2000, glyphs: object = UNICODE, tail: str = "") -> list[str] | None:
    graph = Graph({name: [Dependency(job=each) for each in wanted] for name, wanted in parents.items()})
    jobs = [Job(name, layer, tail=tail) for name, layer in graph.layers.items()]
    edges = [(each, name) for name, wanted in parents.items() for each in wanted]
    lines = draw(jobs, edges, width, glyphs)  # type: ignore[arg-type]
    return None if lines is None else ["".join(text for text, _ in line) for line in lines]


def read_back(lines: list[str], names: list[str]) -> set[tuple[str, str]]:
    """Who is joined to whom, by following the lines from each name to the right."""
    grid = {(row, column): glyph for row, line in enumerate(lines) for column, glyph in enumerate(line)}
    ends: dict[tuple[int, int], str] = {}  # where an arrow may point to
    starts: dict[str, tuple[int, int]] = {}
    for name in names:
        [(row, column)] = [(r, line.index(name)) for r, line in enumerate(lines) if name in line]
        starts[name] = row, column + len(name) + 1
        ends[row, column] = name
        while grid.get((row, column - 2)) in tuple(UNICODE.brackets):
            ends[row, column - 2] = name
            row += 1
            if grid[row - 1, column - 2] == UNICODE.brackets[-1]:
                break
    return {(name, ends[end]) for name in names for end in _follow(grid, starts[name])}


def _follow(grid: dict[tuple[int, int], str], start: tuple[int, int]) -> set[tuple[int, int]]:
    """Where the arrows are that lines from here lead to."""
    found, seen = set(), set()
    open_ = [(start, RIGHT)] if grid.get(start, " ") in ARMS else []
    while open_:
        (row, column), way = open_.pop()
        if ((row, column), way) in seen:
            continue
        seen.add(((row, column), way))
        glyph = grid.get((row, column), " ")
        if glyph == UNICODE.arrow:
            found.add((row, column + 2))
            continue
        if way == LEFT and glyph not in ARMS:
            continue  # the name of another whose line this is
        assert glyph in ARMS, f"a line breaks off at {row, column}"
        arms = [WAYS[arm] for arm in ARMS[glyph]]
        back = (-way[0], -way[1])
        # What has no arm towards where one comes from is passed.
        ways = [each for each in arms if each != back] if back in arms else [way]
        open_ += [((row + each[0], column + each[1]), each) for each in ways]
    return found


@st.composite
def graphs(draw: st.DrawFn) -> Parents:
    size = draw(st.integers(1, 25))
    reach = draw(st.integers(1, size))
    found: Parents = {}
    for number in range(size):
        earlier = list(found)[-reach:]
        found[f"j{number}."] = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=4)) if earlier else []
    return found


@given(graphs())
@settings(max_examples=150)
def test_who_follows_the_lines_finds_every_edge_and_no_other(parents: Parents) -> None:
    lines = drawn(parents)
    assert lines is not None
    edges = {(each, name) for name, wanted in parents.items() for each in wanted}
    assert read_back(lines, list(parents)) == edges, "\n".join(lines)


def test_a_diamond() -> None:
    assert drawn(DIAMOND) == [
        "extract ─┬─► clean ─┬─► load",
        "         ╰─► check ─╯",
    ]
    assert drawn(DIAMOND, glyphs=ASCII) == [
        "extract -+-> clean -+-> load",
        "         +-> check -+",
    ]


def test_a_parent_of_one_is_no_parent_of_the_other() -> None:
    assert drawn({"a": [], "b": [], "c": ["a"], "d": ["a", "b"]}) == [
        "a ───┬─► c",
        "b ─╮ ╰─► ╭ d",
        "   ╰───► ╰",
    ]


def test_names_are_cut_where_there_is_no_room_and_then_it_is_not_drawn() -> None:
    long = {"a" * 40: [], "b" * 40: ["a" * 40]}
    assert drawn(long) == [f"{'a' * 40} ─► {'b' * 40}"]
    assert drawn(long, 68) == [f"{'a' * 31}… ─► {'b' * 31}…"]
    assert drawn(long, 68, tail="1 s") == [f"{'a' * 19}… 1 s ─► {'b' * 19}… 1 s"]
    assert drawn(long, 50, tail="1 s") == [f"{'a' * 19}… ─► {'b' * 19}…"]
    assert drawn(long, 15) is None


def test_no_line_is_wider_than_there_is_room() -> None:
    parents = {f"job-{n}": [f"job-{m}" for m in range(max(0, n - 2), n)] for n in range(6)}
    for width in range(60, 160, 10):
        lines = drawn(parents, width)
        assert lines is None or max(map(len, lines)) <= width


def test_many_are_not_drawn() -> None:
    fan: Parents = {"first": []} | {f"n{n}": ["first"] for n in range(MOST_DRAWN - 1)}
    lines = drawn(fan)
    assert lines is not None and len(lines) == MOST_DRAWN - 1
    assert drawn(fan | {"one-more": ["first"]}) is None
    assert drawn({f"n{n}": [f"n{n - 1}"] if n else [] for n in range(MOST_DRAWN)}, 200) is None
    assert drawn({}) == []
