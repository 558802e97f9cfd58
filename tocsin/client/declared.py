"""What `@app.job(…)` may say, and the job document that it makes. Standard library only."""

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


class JobOptions(TypedDict, total=False):
    """What a job declares of itself; what it leaves out is as in the API. Lengths of time are "10m", a `timedelta` or
    seconds; instants are RFC 3339 or a `datetime` with a time zone."""

    name: str  # else the app's name and the function's
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


def checked(given: dict[str, Any]) -> JobOptions:
    """Refuse what only a programmer can get wrong; the server judges the rest."""
    if unknown := given.keys() - JobOptions.__annotations__.keys():
        raise TypeError(f"@app.job() takes no option {', '.join(sorted(unknown))}")
    options = cast(JobOptions, given)
    if options.get("isolation", "thread") not in ("thread", "process"):
        raise ValueError(f'isolation is "thread" or "process", not {options["isolation"]!r}')
    if "retries" in options and "max_attempts" in options.get("retry", {}):
        raise ValueError("retries and retry['max_attempts'] say the same: give one of them")
    kinds = [kind for kind in _SCHEDULE if kind in options]
    if len(kinds) > 1:
        raise ValueError(f"a job has one schedule, not {' and '.join(kinds)}")
    if not kinds and (stray := [name for name in _WITH_SCHEDULE if name in options]):
        raise ValueError(f"without a schedule, {', '.join(stray)} would mean nothing")
    return options


def document(function: Function, app: str, options: JobOptions) -> dict[str, Any]:
    """The job as the API takes it."""
    schedule = {name: value for name, value in options.items() if name in (*_SCHEDULE, *_WITH_SCHEDULE)}
    rest = {name: value for name, value in options.items() if name not in schedule and name not in _SDK_ONLY}
    doc = {
        "name": function.name,
        "target": {"kind": "python", "function": function.name},
        "schedule": schedule or {"manual": True},
        "retry": _retry(options),
        "tags": {APP_TAG: app, **options.get("tags", {})} if app else options.get("tags", {}),
        "description": options.get("description", _first_line(function.call.__doc__)),
        **rest,
    }
    plain: dict[str, Any] = _plain({name: value for name, value in doc.items() if value not in ({}, "")})
    return plain


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
