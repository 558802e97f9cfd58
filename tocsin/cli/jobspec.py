"""From the flags of `job create` to a job document. Only what is given is sent: the server knows the defaults."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from tocsin.cli.shared import json_object

Document = dict[str, Any]


def compact(**values: Any) -> Document:
    """Without what is not given."""
    return {name: value for name, value in values.items() if value is not None and value != {} and value != []}


_BOUNDS = ("timezone", "starting_at", "until", "jitter")


def schedule(*, manual: bool, **given: str | None) -> Document | None:
    """When: at most one of the kinds, and what bounds it; none means now, once."""
    chosen = compact(manual=manual or None, **{name: value for name, value in given.items() if name not in _BOUNDS})
    if len(chosen) > 1:
        raise typer.BadParameter(f"give only one of {', '.join('--' + kind for kind in chosen)}")
    extra = compact(**{name: given.get(name) for name in _BOUNDS})
    if extra and not chosen:
        options = ", ".join("--tz" if name == "timezone" else f"--{name.replace('_', '-')}" for name in extra)
        raise typer.BadParameter(f"{options} need a schedule, such as --cron, --every or --text")
    return chosen | extra or None


def target(
    *, command: list[str] | None, python: str | None, kwargs: str | None, env: dict[str, str], cwd: str | None
) -> Document | None:
    """What: a program with its arguments, or a function of the workers."""
    if command and python:
        raise typer.BadParameter("give either --python or a command, not both")
    if python:
        if env or cwd:
            raise typer.BadParameter("--env and --cwd belong to a command, not to --python")
        return compact(kind="python", function=python, kwargs=json_object(kwargs, "--kwargs"))
    if kwargs is not None:
        raise typer.BadParameter("--kwargs belongs to --python")
    if command:
        return compact(kind="process", command=command, env=env, cwd=cwd)
    if env or cwd:
        raise typer.BadParameter("--env and --cwd need a command: -- program arguments…")
    return None


def choose(file: str | None, flags: Document) -> Document:
    """The document of the file, or that of the flags."""
    if file is not None:
        if flags:
            raise typer.BadParameter(f"--file says it all; it cannot be mixed with {', '.join(sorted(flags))}")
        return read(file)
    if "target" not in flags:
        raise typer.BadParameter("say what to run: -- program arguments…, --python function, or --file job.json")
    return flags


def read(file: str) -> Document:
    """A job document from a file, or from standard input for `-`."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="--file") from None
    return json_object(text, "--file") or {}
