"""The SQL of the steps, read: every statement that writes a run's state says where it comes from, and makes no move
that `model.states` does not allow; and every move it allows is made somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from tocsin.model.states import BLOCKERS, FINAL, LIVE, OUTCOMES, REASONS, RUN_MOVES, TRIGGERS
from tocsin.store.db import Sql

ROOT = Path(__file__).parents[2] / "tocsin"
FILES = sorted((ROOT / "flow").rglob("*.sql"))
STATES = {*LIVE, *FINAL}
# `new`: there was no run; `unmade`: an occurrence retracted as if it had never been staged.
BIRTHS = {("new", "staged"), ("new", "ready")}
RETRACTED = {(state, "unmade") for state in ("staged", "ready", "waiting")}


class Write(NamedTuple):
    """One part of a statement that writes runs: what it is, and the states it goes from and to."""

    where: str
    kind: str
    sources: frozenset[str]
    targets: frozenset[str]


def without_comments(sql: str) -> str:
    return re.sub(r"--[^\n]*", "", sql)


def closing(sql: str, position: int) -> int:
    """Where the parenthesis that was opened before `position` has closed."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(sql[position], 0)
        position += 1
    return position


def parts(sql: str) -> dict[str, str]:
    """A statement's CTEs by name, and the rest as ``""``."""
    out: dict[str, str] = {}
    rest, position = "", 0
    for match in re.finditer(r"(\w+) as (?:not materialized |materialized )?\(", sql):
        if match.start() < position:
            continue
        end = closing(sql, match.end())
        out[match.group(1)] = sql[match.end() : end - 1]
        rest += sql[position : match.start()]
        position = end
    out[""] = rest + sql[position:]
    return out


_STATE_TEST = re.compile(r"\bstate (?:= '(\w+)'|in \(([^)]*)\))")


def states_tested(body: str) -> set[str]:
    """The live states that a part's conditions name for the rows it touches (not in sub-selects of others)."""
    body = re.sub(r"set\s+state = (?:'\w+'|case .*? end)", "", body, flags=re.DOTALL)
    # What is looked up or counted about other runs says nothing about the row itself.
    while start := re.search(r"\bexists\s*\(|\((?=\s*select count\()", body):
        body = body[: start.start()] + body[closing(body, start.end()) :]
    found = set()
    for one, many in _STATE_TEST.findall(body):
        found |= {one} if one else set(re.findall(r"'(\w+)'", many))
    return found & set(LIVE)


def sources(name: str, all_parts: dict[str, str], seen: frozenset[str] = frozenset()) -> set[str]:
    """The states a part names; if it names none, those of the parts that it takes its rows from."""
    own = states_tested(all_parts[name])
    if own:
        return own
    found = set()
    for other in all_parts.keys() - seen - {"", name}:
        if re.search(rf"\b(?:from|join|using|,)\s+{other}\b", all_parts[name]):
            found |= sources(other, all_parts, seen | {name})
    return found


def targets(body: str, header: str) -> set[str]:
    """What follows: written out, or (where it is a parameter or decided row by row) as the statement's comment says."""
    named = set(re.findall(r"'(\w+)'(?:::text)? as final_state", body))
    for decided in re.findall(r"\bcase ((?:(?!\bcase\b).)*?) end as final_state", body, re.DOTALL):
        named |= set(re.findall(r"'(\w+)'", decided)) & set(FINAL)
    if named:
        return named
    listed = re.search(r"→ ([^\n]*)", header)
    return set(re.findall(r"\w+", listed.group(1))) & set(FINAL) if listed else set()


def writes(where: str, sql: str) -> Iterator[Write]:
    header = "\n".join(line for line in sql.splitlines() if line.startswith("--"))
    all_parts = parts(without_comments(sql))
    for name, body in all_parts.items():
        own = re.sub(r"\s+", " ", body)
        place = f"{where}{f' ({name})' if name else ''}"
        if re.search(r"\bupdate runs\b", own):
            to = re.search(r"\bset state = (?:'(\w+)'|case (.*?) end)", own)
            if to:
                found = {to.group(1)} if to.group(1) else set(re.findall(r"(?:then|else) '(\w+)'", to.group(2)))
                yield Write(place, "update", frozenset(sources(name, all_parts)), frozenset(found))
            else:
                assert not re.search(r"\bstate = ", own.partition(" where ")[0]), f"{place} sets a computed state"
        if re.search(r"\bdelete from runs\b", own):
            found = targets(own, header) or {"unmade"}
            yield Write(place, "delete", frozenset(sources(name, all_parts)), frozenset(found))
        if re.search(r"\binsert into runs\b", own):
            born = set(re.findall(r"'(\w+)'", (re.search(r"case when.*?end", own) or re.match("", "")).group()))  # type: ignore[union-attr]
            yield Write(place, "insert", frozenset({"new"}), frozenset(born & STATES))


# What any of the shared files lends; the transitions lend to the others, too.
TRANSITIONS = Sql(str(ROOT / "flow/shared/transitions.sql"))
SHARED = cast(
    "Sql",
    {
        name: sql
        for path in (ROOT / "flow/shared").glob("*.sql")
        for name, sql in Sql(str(path), None if path.stem == "transitions" else TRANSITIONS).items()
    },
)


def statements() -> dict[str, str]:
    out = {}
    for path in FILES:
        included = set(re.findall(r"-- :include (\w+)", path.read_text()))
        for name, sql in Sql(str(path), SHARED if included & SHARED.keys() else None).items():
            if name not in included:  # a part is judged where it is used
                out[f"{path.relative_to(ROOT)}:{name}"] = sql
    return out


def moves(found: list[Write]) -> set[tuple[str, str]]:
    return {(a, b) for w in found for a in w.sources for b in w.targets if a != b}


ALL = [write for where, sql in statements().items() for write in writes(where, sql)]


def test_the_reader_sees_the_statements_that_matter() -> None:
    seen = {w.where.rpartition("/")[2].partition(" ")[0] for w in ALL}
    assert seen >= {
        "claim.sql:take",
        "claim.sql:take_limited",
        "claim.sql:promote",
        "report.sql:finish",
        "report.sql:give_back",
        "transitions.sql:cancel_runs",
        "control.sql:waiting_paused",
        "sweep.sql:keep",
        "sweep.sql:unpause",
        "joins.sql:settle",
        "joins.sql:conclude",
        "transitions.sql:stage",
        "transitions.sql:end_unheld",
        "transitions.sql:release",
        "transitions.sql:retract",
    }


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("update runs r set state = 'running' where r.id = $1", (set(), {"running"})),
        ("update runs r set state = 'ready' where r.state = 'stopping'", ({"stopping"}, {"ready"})),
        (
            "with a as (select id from runs r where r.state in ('ready', 'staged'))\n"
            "update runs r set state = 'waiting' from a where r.id = a.id",
            ({"ready", "staged"}, {"waiting"}),
        ),
        (
            "with a as (select id from runs r where r.state = 'ready' for update),\n"
            "ended as (delete from runs r using a where r.id = a.id returning r.*, 'skipped' as final_state)\n"
            "select 1",
            ({"ready"}, {"skipped"}),
        ),
        (
            "delete from runs r where r.state = 'ready'\n"
            "returning case r.trigger when 'api' then 'expired' else 'skipped' end as final_state",
            ({"ready"}, {"expired", "skipped"}),
        ),
        ("-- running → cancelled\ndelete from runs r where r.state = 'running'", ({"running"}, {"cancelled"})),
        ("delete from runs where id = $1", (set(), {"unmade"})),
    ],
)
def test_the_reader_finds_a_seeded_move(sql: str, expected: tuple[set[str], set[str]]) -> None:
    [write] = writes("lie", sql)
    assert (set(write.sources), set(write.targets)) == expected


def test_a_computed_state_is_refused() -> None:
    with pytest.raises(AssertionError, match="computed"):
        list(writes("lie", "update runs r set state = t.state from told t where r.id = t.id"))


@pytest.mark.parametrize("write", ALL, ids=lambda w: w.where)
def test_each_write_names_where_it_comes_from_and_moves_legally(write: Write) -> None:
    assert write.sources, f"{write.where} does not say which states it comes from"
    assert write.targets <= STATES | {"unmade"}
    illegal = moves([write]) - RUN_MOVES.keys() - BIRTHS - RETRACTED - DECIDED_BY_ROW.get(write.where, set())
    assert not illegal, f"{write.where} makes {illegal}"


# Statements that decide row by row which of their sources goes where; what stands here never happens, and why.
DECIDED_BY_ROW: dict[str, set[tuple[str, str]]] = {
    # A stopping run that did not succeed is always cancelled (`case when r.state = 'stopping' …`).
    "flow/report.sql:finish (again)": {("stopping", "staged")},
    "flow/report.sql:finish (gone)": {("stopping", "dead")},
    # A stopping run has a stop_reason, and who has one is not given back but ended.
    "flow/report.sql:give_back (back)": {("stopping", "ready"), ("stopping", "staged")},
    # Only the claim and the misfire rule skip, and never what waits; `expired` and `cancelled` take any.
    "flow/shared/transitions.sql:end_unheld (ended)": {("waiting", "skipped")},
}


def test_every_legal_move_is_made_somewhere() -> None:
    unused = RUN_MOVES.keys() - moves(ALL)
    assert not unused, f"nothing makes {unused}"


def test_only_retraction_and_erasure_unmake_a_run() -> None:
    unmade = {w.where for w in ALL if "unmade" in w.targets}
    assert unmade == {"flow/shared/transitions.sql:retract (gone)", "flow/erase.sql:let_go (gone)"}


def test_whatever_ends_a_run_tells_its_backfill() -> None:
    told, ending = statements(), [w for w in ALL if w.kind == "delete" and "unmade" not in w.targets]
    assert len(ending) > 4
    for write in ending:
        assert "insert into backfill_ends" in told[write.where.partition(" ")[0]], write.where


def test_nothing_but_the_steps_writes_runs() -> None:
    for path in ROOT.rglob("*.sql"):
        if path not in FILES and path.parent.name != "migrations":
            assert not re.search(r"(update|delete from|insert into) runs\b", path.read_text()), path


def test_the_words_of_the_model_are_the_words_of_the_schema() -> None:
    schema = (ROOT / "store" / "migrations" / "0001_core.sql").read_text()
    runs = schema[schema.index("create table runs") : schema.index("create table history")]
    history = schema[schema.index("create table history") :]

    def words(text: str, pattern: str) -> tuple[str, ...]:
        found = re.search(pattern + r" in \(([^)]*)\)", text)
        assert found, pattern
        return tuple(re.findall(r"'(\w+)'", found.group(1)))

    assert words(runs, "check \\(state") == LIVE
    assert words(runs, "check \\(trigger") == TRIGGERS
    assert words(runs, "check \\(blocked_by") == BLOCKERS
    assert words(history, "check \\(outcome") == OUTCOMES
    assert words(history, "not final or state") == FINAL
    literal = set(re.findall(r"'(skipped_\w+|coalesced|misfire_\w+|upstream_\w+)'", "".join(statements().values())))
    assert literal <= set(REASONS)


def test_live_and_final_states_share_nothing_and_the_end_is_the_end() -> None:
    assert not set(LIVE) & set(FINAL)
    assert {a for a, _ in RUN_MOVES} <= set(LIVE)
    reached = {b for _, b in RUN_MOVES}
    assert reached >= set(FINAL) and all(steps for steps in RUN_MOVES.values())
