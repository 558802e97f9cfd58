"""What `@app.job(…)` and `app.workflow(…)` may say, and the documents that they make. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from tocsin.client.failures import Length, dotted

if TYPE_CHECKING:
    from tocsin.client.app import Function

Moment = str | datetime

APP_TAG = "tocsin.app"
# Not `at`: what is declared holds at every start of every worker, and a job that is over would be made anew.
_SCHEDULE = ("cron", "every", "interval", "rrule", "text")
_WITH_SCHEDULE = ("timezone", "starting_at", "until", "max_runs", "calendar", "jitter", "dst", "misfire")
_SDK_ONLY = ("name", "isolation", "retries", "retry", "tags", "description")


class ScheduleOptions(TypedDict, total=False):
    """When it is due by itself; without any of them, when it is submitted."""

    cron: str
    every: Length
    interval: str
    rrule: str
    text: str
    timezone: str
    starting_at: Moment
    until: Moment
    max_runs: int
    calendar: str
    jitter: Length
    dst: Mapping[str, str]
    misfire: Mapping[str, Any]


class JobOptions(ScheduleOptions, total=False):
    """What a job declares of itself; what it leaves out is as in the API. Lengths of time are "10m", a `timedelta` or
    seconds; instants are RFC 3339 or a `datetime` with a time zone."""

    name: str  # else the app's name and the function's
    retries: int  # after the first attempt
    retry: Mapping[str, Any]  # in `retry_on` and `give_up_on` exception classes may stand for their names
    timeout: Length
    start_deadline: Length
    isolation: Literal["thread", "process"]  # process: in a process that runs nothing else meanwhile
    pool: str
    priority: int
    resources: Mapping[str, float]
    placement: Mapping[str, Any]
    overlap: Literal["skip", "queue", "queue_all", "allow", "replace"]
    max_concurrency: int
    concurrency_key: str | Mapping[str, Any]
    rate_limit: str | Mapping[str, Any]
    circuit: str
    secrets: Mapping[str, str]
    sensitive: bool  # its arguments and results are kept sealed and shown to nobody
    tags: Mapping[str, str]
    description: str  # else the first line of the function's docstring


class WorkflowOptions(ScheduleOptions, total=False):
    """What a workflow declares of itself."""

    timeout: Length  # of a run of the whole
    start_deadline: Length
    priority: int  # of its jobs, too, unless they have their own
    overlap: Literal["skip", "queue", "queue_all", "allow", "replace"]
    max_concurrency: int  # runs of the whole at once
    tags: Mapping[str, str]
    description: str


def checked(given: dict[str, Any]) -> JobOptions:
    """Refuse what only a programmer can get wrong; the server judges the rest."""
    _refuse_unknown("@app.job()", given, JobOptions)
    options = cast(JobOptions, given)
    if options.get("isolation", "thread") not in ("thread", "process"):
        raise ValueError(f'isolation is "thread" or "process", not {options["isolation"]!r}')
    if "retries" in options and "max_attempts" in options.get("retry", {}):
        raise ValueError("retries and retry['max_attempts'] say the same: give one of them")
    _check_schedule("a job", given)
    return options


def checked_workflow(given: dict[str, Any]) -> WorkflowOptions:
    """The same for a workflow."""
    _refuse_unknown("app.workflow()", given, WorkflowOptions)
    _check_schedule("a workflow", given)
    return cast(WorkflowOptions, given)


def _refuse_unknown(call: str, given: dict[str, Any], known: type) -> None:
    if unknown := given.keys() - known.__annotations__.keys():
        raise TypeError(f"{call} takes no option {', '.join(sorted(unknown))}")


def _check_schedule(what: str, given: dict[str, Any]) -> None:
    kinds = [kind for kind in _SCHEDULE if kind in given]
    if len(kinds) > 1:
        raise ValueError(f"{what} has one schedule, not {' and '.join(kinds)}")
    if not kinds and (stray := [name for name in _WITH_SCHEDULE if name in given]):
        raise ValueError(f"without a schedule, {', '.join(stray)} would mean nothing")


def document(function: Function, app: str, options: JobOptions) -> dict[str, Any]:
    """The job as the API takes it."""
    schedule, others = _split(options)
    return plain(
        {
            "name": function.name,
            "target": {"kind": "python", "function": function.name},
            "schedule": schedule,
            "retry": _retry(options),
            "tags": _tags(app, options),
            "description": options.get("description", _first_line(function.call.__doc__)),
            **{name: value for name, value in others.items() if name not in _SDK_ONLY},
        }
    )


def workflow_document(name: str, app: str, options: WorkflowOptions, jobs: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow as the API takes it."""
    schedule, others = _split(options)
    return plain({"name": name, "schedule": schedule, **others, "tags": _tags(app, options), "jobs": jobs})


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schedule, and all the rest."""
    schedule = {name: value for name, value in options.items() if name in (*_SCHEDULE, *_WITH_SCHEDULE)}
    return schedule or {"manual": True}, {name: value for name, value in options.items() if name not in schedule}


def _tags(app: str, options: Mapping[str, Any]) -> dict[str, str]:
    tags: dict[str, str] = dict(options.get("tags", {}))
    return {APP_TAG: app, **tags} if app else tags


def plain(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document as JSON has it, without what says nothing."""
    return {name: _plain(value, name) for name, value in document.items() if value not in ({}, "")}


def length(value: Length) -> str:
    """A length of time as the API reads it."""
    if isinstance(value, str):
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    return f"PT{seconds:.6f}".rstrip("0").rstrip(".") + "S"


def moment(value: Moment) -> str:
    """An instant as the API reads it."""
    if isinstance(value, str):
        return value
    if value.tzinfo is None:
        raise ValueError(f"{value} has no time zone, so it names no instant")
    return value.isoformat()


def _retry(options: JobOptions) -> dict[str, Any]:
    retry = dict(options.get("retry", {}))
    if "retries" in options:
        retry["max_attempts"] = options["retries"] + 1
    return retry


_LENGTHS = ("every", "jitter", "timeout", "start_deadline", "delay", "max_delay", "window")


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part, key) for key, part in value.items()}
    if isinstance(value, type) and issubclass(value, BaseException):
        return dotted(value)
    if isinstance(value, timedelta) or (name in _LENGTHS and isinstance(value, int | float)):
        return length(value)
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    return value


def _first_line(doc: str | None) -> str:
    lines = (doc or "").strip().splitlines()
    return lines[0].strip()[:4096] if lines else ""
