"""Job documents on the command line: made from flags, read from files, put together as patches, compared.

Only what is given is sent: the server knows the defaults.
"""

# No `from __future__ import annotations`: typer would evaluate each of the flags at every start.
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from tocsin.cli.shared import assignments, json_object, json_value, megabytes

Document = dict[str, Any]

KINDS = ("text", "cron", "every", "interval", "rrule", "at", "delay", "manual")
# The options that belong to each kind of target.
_OPTIONS_OF = {
    "command": ("env", "cwd", "shell", "sandbox"),
    "python": ("kwargs",),
    "http": ("method", "header", "body"),
    "image": ("network",),
}
_BOXED = ("command", "env", "image", "network")
_BOUNDS = ("timezone", "starting_at", "until", "max_runs", "jitter", "calendar")


def compact(**values: Any) -> Document:
    """Without what is not given."""
    return {name: value for name, value in values.items() if value is not None and value != {} and value != []}


# ── flags ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What a job is, as options of a command."""

    command: Annotated[
        list[str] | None, typer.Argument(help="What to run: -- program arguments…", show_default=False)
    ] = None
    name: Annotated[str | None, typer.Option(help="Unique among your live jobs.")] = None
    cron: Annotated[str | None, typer.Option(help='Such as "0 9 * * MON-FRI".')] = None
    every: Annotated[str | None, typer.Option(help="An interval such as 5m or PT5M.")] = None
    text: Annotated[str | None, typer.Option(help='Such as "every weekday at 9am" or "tomorrow at noon".')] = None
    rrule: Annotated[str | None, typer.Option(help='Such as "FREQ=MONTHLY;BYDAY=-1FR" (RFC 5545).')] = None
    interval: Annotated[str | None, typer.Option(help="Such as R5/2026-01-01T00:00:00Z/P1D (ISO-8601).")] = None
    at: Annotated[str | None, typer.Option(help="Once, at 2026-12-01T09:00:00+01:00.")] = None
    delay: Annotated[str | None, typer.Option(help="Once, so long from now.")] = None
    manual: Annotated[bool, typer.Option("--manual", help="Only when asked for.")] = False
    tz: Annotated[str | None, typer.Option(help="Time zone of the schedule, if not UTC.")] = None
    starting_at: Annotated[str | None, typer.Option(help="No occurrence before this instant.")] = None
    until: Annotated[str | None, typer.Option(help="No occurrence after this instant.")] = None
    max_runs: Annotated[int | None, typer.Option(help="So many occurrences at most.")] = None
    jitter: Annotated[str | None, typer.Option(help="Begin each run up to so long later, always the same.")] = None
    calendar: Annotated[str | None, typer.Option(help="Go by this calendar.")] = None
    python: Annotated[str | None, typer.Option(help="A function of the workers instead of a command.")] = None
    kwargs: Annotated[str | None, typer.Option(help="Its arguments, a JSON object.")] = None
    env: Annotated[list[str] | None, typer.Option(help="A variable of the command.", metavar="NAME=VALUE")] = None
    secret: Annotated[
        list[str] | None, typer.Option(help="A variable with a stored secret in it.", metavar="NAME=SECRET")
    ] = None
    sensitive: Annotated[
        bool | None, typer.Option("--sensitive/--no-sensitive", help="Seal what it and its runs are told.")
    ] = None
    cwd: Annotated[str | None, typer.Option(help="The command's folder on the worker.")] = None
    shell: Annotated[
        bool | None, typer.Option("--shell/--no-shell", help="The command is a line for /bin/sh, and its $1, $2 …")
    ] = None
    sandbox: Annotated[
        bool | None, typer.Option("--sandbox/--no-sandbox", help="Read-only system, own /tmp, no network.")
    ] = None
    http: Annotated[str | None, typer.Option(help="A URL to call instead of a command.", metavar="URL")] = None
    image: Annotated[str | None, typer.Option(help="A container's image, for the command or its own.")] = None
    network: Annotated[str | None, typer.Option(help="The container's: none or bridge.")] = None
    method: Annotated[str | None, typer.Option(help="How to call it, if not by POST.")] = None
    header: Annotated[list[str] | None, typer.Option(help="A header of the call.", metavar="NAME=VALUE")] = None
    body: Annotated[str | None, typer.Option(help="What to send, as JSON; the run's arguments otherwise.")] = None
    pool: Annotated[str | None, typer.Option(help="Which workers.")] = None
    priority: Annotated[int | None, typer.Option(help="0 to 1000, 1000 first.")] = None
    cpu: Annotated[float | None, typer.Option(help="Processors that a run takes.")] = None
    memory: Annotated[str | None, typer.Option(help="Memory that a run takes, such as 512m or 8g.")] = None
    disk: Annotated[str | None, typer.Option(help="Disk that a run takes, such as 10g.")] = None
    gpus: Annotated[int | None, typer.Option(help="Gpus that a run takes.")] = None
    require: Annotated[
        list[str] | None, typer.Option(help="A label that its worker must have.", metavar="NAME=VALUE")
    ] = None
    prefer: Annotated[
        list[str] | None, typer.Option(help="A label whose worker is waited for a moment.", metavar="NAME=VALUE")
    ] = None
    timeout: Annotated[str | None, typer.Option(help="Longest time of one attempt.")] = None
    max_attempts: Annotated[int | None, typer.Option(help="How often it may fail before it is dead.")] = None
    overlap: Annotated[str | None, typer.Option(help="skip, queue, queue_all, allow or replace.")] = None
    max_concurrency: Annotated[int | None, typer.Option(help="How many of its runs at once.")] = None
    concurrency_key: Annotated[
        str | None, typer.Option(help="One at a time of all runs with this key, such as customer-{args.customer}.")
    ] = None
    rate_limit: Annotated[str | None, typer.Option(help="How often it may start, such as 100/min.")] = None
    circuit: Annotated[str | None, typer.Option(help="The circuit of what it calls: see `tocsin circuit`.")] = None
    after: Annotated[
        list[str] | None,
        typer.Option(help="A job that it waits for, on success, failure or completion.", metavar="JOB[:ON]"),
    ] = None
    tag: Annotated[list[str] | None, typer.Option(help="A tag.", metavar="NAME=VALUE")] = None
    description: Annotated[str | None, typer.Option(help="For people.")] = None

    def document(self) -> Document:
        """A new job."""
        return self._plain() | compact(schedule=schedule(**self._when()), target=self._target())

    def patch(self) -> Document:
        """What to change of a job: a kind of schedule or target takes the place of the one it has."""
        return self._plain() | compact(schedule=self._schedule_patch(), target=self._target_patch())

    def _plain(self) -> Document:
        return compact(
            name=self.name,
            pool=self.pool,
            priority=self.priority,
            resources=self._resources(),
            placement=compact(
                require=assignments(self.require, "--require"), prefer=assignments(self.prefer, "--prefer")
            ),
            timeout=self.timeout,
            retry=compact(max_attempts=self.max_attempts),
            overlap=self.overlap,
            max_concurrency=self.max_concurrency,
            concurrency_key=self.concurrency_key,
            rate_limit=self.rate_limit,
            circuit=self.circuit,
            depends_on=[_parent(text) for text in self.after or ()],
            secrets=assignments(self.secret, "--secret"),
            sensitive=self.sensitive,
            tags=assignments(self.tag, "--tag"),
            description=self.description,
        )

    def _resources(self) -> Document:
        sizes = {"memory_mb": megabytes(self.memory, "--memory"), "disk_mb": megabytes(self.disk, "--disk")}
        return compact(cpu=self.cpu, gpus=self.gpus, **sizes)

    def _when(self) -> Document:
        names = (*KINDS, "starting_at", "until", "max_runs", "jitter", "calendar")
        return {name: getattr(self, name) for name in names} | {"timezone": self.tz}

    def _schedule_patch(self) -> Document:
        from tocsin.model.job import SCHEDULE_KINDS

        chosen, bounds = _split(self._when())
        return (dict.fromkeys(SCHEDULE_KINDS) if chosen else {}) | chosen | bounds

    def _target(self) -> Document | None:
        """A program with its arguments, a function of the workers, a request, or a container."""
        chosen = [kind for kind in _OPTIONS_OF if getattr(self, kind)]
        if "image" in chosen:
            return self._boxed()
        if len(chosen) > 1:
            raise typer.BadParameter("give only one of --python, --http and a command")
        for kind, names in _OPTIONS_OF.items():
            given = [name for name in names if getattr(self, name) not in (None, [])]
            if given and kind not in chosen:
                what = "a command: -- program arguments…" if kind == "command" else f"--{kind}"
                raise typer.BadParameter(f"{_options(given)}: only with {what}")
        if self.command:
            return {"kind": "process", "command": self.command} | self._how()
        if self.python:
            return {"kind": "python", "function": self.python} | self._how()
        return {"kind": "http", "url": self.http} | self._how() if self.http else None

    def _boxed(self) -> Document:
        """A container, with a command or that of its image."""
        names = (name for kind, own in _OPTIONS_OF.items() for name in (kind, *own))
        strange = [name for name in names if name not in _BOXED and getattr(self, name) not in (None, [])]
        if strange:
            raise typer.BadParameter(f"{_options(strange)}: not with --image")
        return {"kind": "container", "image": self.image} | compact(command=self.command) | self._how()

    def _how(self) -> Document:
        """What a target has beyond what it is."""
        return compact(
            env=assignments(self.env, "--env"),
            cwd=self.cwd,
            shell=self.shell,
            sandbox=self.sandbox,
            network=self.network,
            kwargs=json_object(self.kwargs, "--kwargs"),
            method=self.method,
            headers=assignments(self.header, "--header"),
            body=None if self.body is None else json_value(self.body, "--body"),
        )

    def _target_patch(self) -> Document:
        if not any(getattr(self, kind) for kind in _OPTIONS_OF):  # they are for the target it has
            return self._how()
        chosen = self._target() or {}
        return dict.fromkeys(_fields_of_others(chosen["kind"])) | chosen


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in place of its parameter `flags`, every option of `Flags`: typer reads them off a signature."""
    options = inspect.signature(Flags).parameters

    @functools.wraps(command)
    def call(**given: Any) -> None:
        command(flags=Flags(**{field.name: given.pop(field.name) for field in fields(Flags)}), **given)

    own = inspect.signature(command)
    taken = [p for o in own.parameters.values() for p in (options.values() if o.name == "flags" else [o])]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in taken]
    call.__signature__ = own.replace(parameters=keywords)  # type: ignore[attr-defined]
    return call


def schedule(**given: Any) -> Document | None:
    """When: at most one of the kinds, and what bounds it; none means now, once."""
    chosen, bounds = _split(given)
    if bounds and not chosen:
        raise typer.BadParameter(f"{_options(bounds)} need a schedule, such as --cron, --every or --text")
    return chosen | bounds or None


def _parent(text: str) -> Document:
    job, _, on = text.partition(":")
    return compact(job=job, on=on or None)


def _options(given: Iterable[str]) -> str:
    return ", ".join("--tz" if name == "timezone" else f"--{name.replace('_', '-')}" for name in given)


def _split(given: Document) -> tuple[Document, Document]:
    """The kind of a schedule, one at most, and its bounds."""
    told = compact(**given | {"manual": given.get("manual") or None})
    bounds = {name: told.pop(name) for name in _BOUNDS if name in told}
    if len(told) > 1:
        raise typer.BadParameter(f"give only one of {', '.join('--' + kind for kind in told)}")
    return told, bounds


def _fields_of_others(kind: str) -> set[str]:
    """What only targets of other kinds have: left behind, it would make no sense."""
    from tocsin.model.targets import WorkerTarget

    names = {each.__struct_config__.tag: set(each.__struct_fields__) for each in get_args(WorkerTarget)}
    return set().union(*names.values()) - names[kind]


# ── files and patches ────────────────────────────────────────────────────────────────────────────────────────────


def choose(file: str | None, flags: Document) -> Document | list[Document]:
    """What the file holds, one job or many, or the job of the flags."""
    if file is not None:
        if flags:
            raise typer.BadParameter(f"--file says it all; it cannot be mixed with {', '.join(sorted(flags))}")
        found = _read(file)
        return _list_of_jobs(found) if isinstance(found, list) else _object(found)
    if "target" not in flags:
        raise typer.BadParameter(
            "say what to run: -- program arguments…, --python function, --http URL, --image NAME, or --file job.json"
        )
    return flags


def read(file: str) -> Document:
    """One document from a file, or from standard input for `-`."""
    return _object(_read(file))


def _read(file: str) -> Any:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="--file") from None
    return json_value(text, "--file")


def _object(found: Any) -> Document:
    if not isinstance(found, dict):
        raise typer.BadParameter('must hold a JSON object such as {"target": …}', param_hint="--file")
    return found


def _list_of_jobs(found: list[Any]) -> list[Document]:
    wrong = next((i for i, job in enumerate(found) if not isinstance(job, dict)), None)
    if wrong is not None or not found:
        what = "holds an empty list" if wrong is None else f"holds something that is no JSON object at [{wrong}]"
        raise typer.BadParameter(f"{what}; it must hold a job, or a list of jobs", param_hint="--file")
    return found


def patch(file: str | None, flags: Document, sets: Iterable[str] | None) -> Document:
    """What to change, from all three sources; each may name what the others do not."""
    whole = together(read(file) if file is not None else {}, flags)
    for text in sets or ():
        whole = together(whole, _assigned(text))
    if not whole:
        raise typer.BadParameter("say what to change: flags such as --priority 900, --set path=json, or --file")
    return whole


def _assigned(text: str) -> Document:
    path, equals, value = text.partition("=")
    names = path.split(".")
    if not equals or not all(names):
        raise typer.BadParameter(f"{text!r} is not path=json, such as retry.max_attempts=5", param_hint="--set")
    try:
        found = json_value(value, "--set")
    except typer.BadParameter as error:
        quoted = f"a text needs its quotes: --set '{path}=\"{value}\"'"
        raise typer.BadParameter(f"{value!r} {error.message}; {quoted}", param_hint="--set") from None
    for name in reversed(names):
        found = {name: found}
    return found  # type: ignore[no-any-return]


def together(one: Document, other: Document, path: str = "") -> Document:
    """Two patches as one. What both name must be objects: of two values nobody could say which is meant."""
    both = one | other
    for name in one.keys() & other.keys():
        if not isinstance(one[name], dict) or not isinstance(other[name], dict):
            raise typer.BadParameter(f"{path}{name} is given twice")
        both[name] = together(one[name], other[name], f"{path}{name}.")
    return both


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────


def changes(old: Document, new: Document, path: str = "") -> Iterator[Document]:
    """Where two documents differ: `{path, from, to}`; null is nothing, as in a merge patch."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict) and before.get("kind") == after.get("kind"):
            yield from changes(before, after, f"{path}{name}.")
        elif before != after:
            yield {"path": f"{path}{name}", "from": before, "to": after}
