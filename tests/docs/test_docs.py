"""The documents agree with the code: generated pages are current, links lead somewhere, commands and paths exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import typer

from docs import generate
from tocsin.cli.main import app
from tocsin.errors import NotSupported
from tocsin.flow.submit import job_request
from tocsin.model.access import Identity
from tocsin.wire import decode_job_spec

ROOT = generate.ROOT
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
NOT_BUILT = (ROOT / "docs" / "not-built.md").read_text(encoding="utf-8")
NOBODY = Identity("", "", "viewer", 0, "")

_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
_PATH = re.compile(r"`((?:tocsin|tests|bench|docs)/[\w./-]+)`")
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_page_is_current(name: str) -> None:
    assert (generate.DOCS / name).read_text(encoding="utf-8") == generate.PAGES[name](), (
        f"docs/{name} is stale: run `.venv/bin/python -m docs.generate`"
    )


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    targets = [t for t in _LINK.findall(path.read_text(encoding="utf-8")) if "://" not in t]
    assert [t for t in targets if not (path.parent / t).exists()] == []


@every_document
def test_named_files_exist(path: Path) -> None:
    assert [p for p in _PATH.findall(path.read_text(encoding="utf-8")) if not (ROOT / p).exists()] == []


@every_document
def test_commands_are_commands(path: Path) -> None:
    for words in _shell_commands(path.read_text(encoding="utf-8")):
        if words[0] == "make":
            assert [word for word in words[1:] if "=" not in word and word not in TARGETS] == []
        elif words[0] == "tocsin":
            _parse(words[1:])


def _shell_commands(text: str) -> Iterator[list[str]]:
    """The simple commands of all blocks marked `sh`, also those in `$(…)`, without redirections and pipes."""
    for block in _BLOCK.findall(text):
        inner = _SUBSTITUTION.findall(block)
        for line in [*_SUBSTITUTION.sub("x", block.replace("\\\n", " ")).splitlines(), *inner]:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
            lexer.whitespace_split = True
            words = list(lexer)
            end = next((i for i, word in enumerate(words) if set(word) <= set("|&;<>")), len(words))
            while words[:end] and re.match(r"[A-Z_]+=", words[0]):
                words, end = words[1:], end - 1
            if words[:end]:
                yield words[:end]


def _parse(words: list[str]) -> None:
    """Let the command line itself read the words, without doing anything; wrong usage raises."""
    command: Any = typer.main.get_command(app)
    name = "tocsin"
    while True:
        context = command.make_context(name, list(words))
        if not hasattr(command, "commands"):
            return
        name, *words = context._protected_args + context.args
        command = command.commands[name]


@pytest.mark.parametrize("field", re.findall(r"^- `(\{.*\})`$", NOT_BUILT, re.MULTILINE))
def test_what_is_said_to_be_not_built_is_refused(field: str) -> None:
    document = {"target": {"kind": "process", "command": ["true"]}} | json.loads(field)
    with pytest.raises(NotSupported):
        job_request(NOBODY, decode_job_spec(json.dumps(document)), None, datetime(2026, 1, 1, tzinfo=UTC))
