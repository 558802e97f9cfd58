"""Documents in YAML: what they mean, what is refused, and on which line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.cli.yamlfile import BadYaml, dump, load

NIGHTLY = """\
name: nightly
schedule: {cron: "0 2 * * *"}
jobs:
  extract: &usual
    target: {kind: process, command: [echo, hi]}
    timeout: 5m
  load:
    <<: *usual
    timeout: 10m
    depends_on:
      - extract
      - job: check
        on: failure
"""


def test_a_workflow_reads_as_its_json_would() -> None:
    [found] = load(NIGHTLY)
    target = {"kind": "process", "command": ["echo", "hi"]}
    assert found.value == {
        "name": "nightly",
        "schedule": {"cron": "0 2 * * *"},
        "jobs": {
            "extract": {"target": target, "timeout": "5m"},
            "load": {"target": target, "timeout": "10m", "depends_on": ["extract", {"job": "check", "on": "failure"}]},
        },
    }


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("jobs.load.depends_on[1].on", 13),
        ("jobs.load.depends_on[0]", 11),
        ("jobs.load.timeout", 9),
        ("jobs.load.target.command[1]", 8),
        ("jobs.load.nowhere.at.all", 8),
        ("schedule.cron", 2),
        ("nowhere", 1),
        ("", 1),
    ],
)
def test_each_value_knows_its_line(path: str, line: int) -> None:
    assert load(NIGHTLY)[0].line_of(path) == line


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2026-12-01", "2026-12-01"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("true", True),
        ("~", None),
        ("", None),
        ("7", 7),
        ("-7", -7),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("'7'", "7"),
        ("!!str 7", "7"),
        ("5m", "5m"),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_words_without_quotes_are_those_of_json(text: str, value: Any) -> None:
    [found] = load(f"a: {text}\n")
    assert found.value == {"a": value} and type(found.value["a"]) is type(value)


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: 2\na: 3", 3, "'a' stands twice"),
        ("a: {b: 1, b: 1}", 1, "'b' stands twice"),
        ("a:\n  - x\n - y", 3, "expected"),
        ("a: b: c", 1, "mapping values are not allowed"),
        ("a: *b", 1, "not known here"),
        ("a: &a [*a]", 1, "stands around its own alias"),
        (bomb(9), 6, "more than 250,000 values"),
        ("[" * 100_000, 1, "deeper than 64"),
        ("a: !!python/object/apply:os.system [ls]", 1, "means nothing here"),
        ("a: !secret x", 1, "means nothing here"),
        ("a: !!int 7", 1, "means nothing here"),
        ("? [a]\n: b", 1, "a key must be a text"),
        ("a: &x b\n*x : c", 2, "a key must be a text"),
        ("a: 1e999", 1, "is a number that JSON does not hold"),
        ("a: " + "9" * 5000, 1, "is a number that JSON does not hold"),
        ("a: {<<: 5}", 1, "<< takes an object"),
        ("a: \0", 1, "control characters"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(BadYaml) as caught:
        load(text)
    assert str(caught.value).startswith(f"line {line}: ") and says in str(caught.value)


def test_several_documents_and_a_bomb_that_is_none() -> None:
    assert [each.value for each in load("a: 1\n---\na: 2\n")] == [{"a": 1}, {"a": 2}]
    assert load("") == []
    assert len(load(bomb(5))[0].value) == 5


_TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" "), max_size=20)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(_TEXTS.filter(lambda key: key != "<<"), _JSON, max_size=5))
def test_json_is_yaml(value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert '"<<"' in text or load(text)[0].value == value


@given(_JSON)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert "<<" in json.dumps(value) or load(dump(value))[0].value == value


_TRICKY = [
    "1e3",
    "0x10",
    "yes",
    "on",
    "12:30",
    "2026-12-01",
    "",
    "~",
    "a\n",
    "\n a",
    "a\n\n",
    " a ",
    "- a",
    "a: b",
    "# a",
]


@given(st.sampled_from(_TRICKY) | st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_stays_one(text: str) -> None:
    assert load(dump({"a": text, "b": [text]}))[0].value == {"a": text, "b": [text]}


def test_what_is_written_is_for_people() -> None:
    value = {"on": "0 2 * * *", "list": ["a", "12:30"], "text": "one\ntwo\n", "number": "12"}
    assert dump(value) == "'on': 0 2 * * *\nlist: [a, '12:30']\ntext: |\n  one\n  two\nnumber: \"12\"\n"
