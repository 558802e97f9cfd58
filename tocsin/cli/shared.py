"""What the commands share: their common options, the way to the server, names for ids, and honest endings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from tocsin.cli.text import length, plain
from tocsin.errors import TocsinError

if TYPE_CHECKING:
    from tocsin.client.core import ApiError
    from tocsin.client.sync import Client

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text for people.")]
Ids = Annotated[bool, typer.Option("--ids", help="Print ids only, one a line, for other commands.")]
Limit = Annotated[int, typer.Option("--limit", min=0, help="How many at most; 0: all.", metavar="N")]
IfMatch = Annotated[
    int | None, typer.Option("--if-match", min=1, help="Only if the job is still at this version.", metavar="N")
]
Reason = Annotated[str, typer.Option("--reason", help="Why; kept in the audit.", metavar="TEXT")]
JobRef = Annotated[str, typer.Argument(help="The job's id or name.", metavar="JOB", show_default=False)]
RunId = Annotated[str, typer.Argument(help="The run's id.", metavar="RUN", show_default=False)]
DEFAULT_LIMIT = 50
JobState = Literal["active", "paused", "cancelled", "completed"]
LiveState = Literal["staged", "ready", "waiting", "running", "stopping"]
FinalState = Literal["succeeded", "dead", "cancelled", "expired", "skipped"]
RunState = Literal[LiveState, FinalState]
AnyState = Literal[JobState, LiveState, FinalState]
Outcome = Literal["succeeded", "failed", "timeout", "lost", "cancelled"]
BackfillState = Literal["running", "paused", "completed", "cancelled"]
CircuitState = Literal["closed", "open", "half_open"]

REFUSED, UNREACHABLE = 1, 3
EXIT_CODES = (
    "Exit codes: 0 done, 1 refused (by the server or by this machine's set-up), 2 wrong usage, 3 the server cannot be "
    "reached, 4 worker and server are of releases that cannot work together, 130 interrupted."
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_tenant: ContextVar[str | None] = ContextVar("tenant", default=None)


def act_for(tenant: str | None) -> None:
    """Let this command's calls act for another tenant."""
    _tenant.set(tenant)


def connect() -> Client:
    """A client for the server of this environment."""
    from tocsin.client.sync import Client

    return Client(tenant=_tenant.get())


def tenant() -> str | None:
    """The tenant this command acts for, if another than the key's own."""
    return _tenant.get()


def noun(help: str) -> typer.Typer:
    """A group of commands about one kind of thing. Without rich markup typer leaves rich unloaded."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)


def is_id(ref: str) -> bool:
    """Whether this is an id, and so no name."""
    return _UUID.fullmatch(ref) is not None


def find_job(client: Client, ref: str) -> dict[str, Any]:
    """The job with this id, or the one that bears this name: an open one first, else the latest that ended."""
    if is_id(ref):
        return client.get_job(ref)
    found = find_open(client, ref)
    if found is not None:
        return found
    from tocsin.client.core import ApiError

    for job in client.list_jobs(q=ref, limit=500):
        if job.get("name") == ref:
            return job
    raise ApiError(404, "not_found", f"there is no job named {ref!r}")


def find_open(client: Client, name: str) -> dict[str, Any] | None:
    """The open job of this name, if there is one."""
    from tocsin.client.core import ApiError

    try:
        return client.get_named_job(name)
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def find_job_id(client: Client, ref: str) -> str:
    """Its id, asked for only if a name is given."""
    return ref if is_id(ref) else str(find_job(client, ref)["id"])


# ── reading options ──────────────────────────────────────────────────────────────────────────────────────────────


def json_value(text: str, option: str) -> Any:
    """An option or file that holds JSON, as strictly as the server reads it: nothing is lost on the way there."""
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint=option) from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object names {next(n for n in names if names.count(n) > 1)!r} twice")
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def json_object(text: str | None, option: str) -> dict[str, Any] | None:
    """An option that holds a JSON object."""
    if text is None:
        return None
    value = json_value(text, option)
    if not isinstance(value, dict):
        raise typer.BadParameter('must be a JSON object such as {"day": "monday"}', param_hint=option)
    return value


def assignments(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """A repeated option `name=value`."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not name=value", param_hint=option)
        found[name] = value
    return found


_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([kmgt]?)i?b?", re.IGNORECASE | re.ASCII)


def megabytes(text: str | None, option: str) -> int | None:
    """A size such as 512m, 8g or 1.5t; a bare number is MB. Whole MB, rounded up."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512m or 8g", param_hint=option)
    return math.ceil(float(match[1]) * 1024.0 ** ("kmgt".index(match[2].lower() or "m") - 1))


def tag_filter(tag: str | None) -> str | None:
    """A tag as lists want it: `name:value`."""
    return None if tag is None else ":".join(*assignments([tag], "--tag").items())


def page_size(limit: int) -> int:
    """Pages so large that one is enough, if the server allows: one more than shown says whether there are more."""
    return 500 if limit == 0 else min(limit + 1, 500)


# ── endings ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Root(TyperGroup):
    """The whole command line: turns every expected error into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TocsinError as error:
            line, code = explain(error)
            typer.echo(f"tocsin: {line}", err=True)
            raise typer.Exit(code) from None


def explain(error: TocsinError) -> tuple[str, int]:
    """An error as one line that says what to do, and the exit code."""
    # Without the client loaded there can be none of its errors.
    from tocsin.client.core import ApiError, Unreachable

    if isinstance(error, ApiError):
        told = [f"{e.get('path')}: {e.get('message')}" for e in error.errors]
        parts = [error.detail, *(text for text in told if text not in error.detail)]
        return plain(f"{'; '.join(parts)} [{error.code}]{_advice(error)}"), REFUSED
    if isinstance(error, Unreachable):
        return plain(f"{error}; is it running? `tocsin up` starts one, TOCSIN_URL says where it is"), UNREACHABLE
    return plain(error), REFUSED


def _advice(error: ApiError) -> str:
    from datetime import timedelta

    if error.retry_after is not None:
        return f"; try again in {length(timedelta(seconds=error.retry_after))}"
    match error.status:
        case 401:
            return "; check TOCSIN_KEY, or the key in credentials.toml"
        case 403:
            return "; this needs a key with another role"
        case 404:
            return "; check the id or name, and whose tenant your key belongs to"
        case 412:
            return "; `tocsin job show` shows it as it is now"
        case 502 | 503 | 504:
            return "; try again in a moment"
        case 500:
            return "; the server's log has the details"
        case _:
            return ""
