"""`tocsin tenant`: who shares this Tocsin (platform keys only)."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tocsin.cli.live import Step, follow
from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, Reason, assignments, connect, noun, page_size
from tocsin.cli.text import local, pairs, plain, relative, size

if TYPE_CHECKING:
    from tocsin.client.sync import Client

app = noun("Look after tenants; needs a platform key.")

Slug = Annotated[str, typer.Argument(help="The tenant's short name.", metavar="SLUG", show_default=False)]
Quota = Annotated[
    list[str] | None,
    typer.Option(
        help="max_jobs, max_queued, max_running, submit_rate (100/s) or log_bytes_per_day; none takes it away.",
        metavar="NAME=VALUE",
    ),
]
_NUMBERS = ("max_jobs", "max_queued", "max_running", "log_bytes_per_day")


def _set(tenant: Document) -> dict[str, object]:
    """The quotas that a tenant has."""
    return {name: value for name, value in (tenant.get("quotas") or {}).items() if value is not None}


def _state(tenant: Document) -> str:
    since, erasure = tenant.get("suspended_at"), tenant.get("erasure")
    if erasure:
        return f"being erased: {erasure['rows']} rows and {erasure['objects']} objects are gone"
    return f"suspended {relative(since, now())}" if since else "active"


COLUMNS = [
    Column("SLUG", lambda tenant: tenant["slug"], whole=True),
    Column("WEIGHT", lambda tenant: tenant.get("weight")),
    Column("STATE", _state),
    Column("QUOTAS", lambda tenant: pairs(_set(tenant))),
    Column("CREATED", lambda tenant: local(tenant.get("created_at"))),
]


@app.command()
def create(
    slug: Annotated[str, typer.Argument(help="Its short name: a-z, 0-9 and hyphens.", show_default=False)],
    weight: Annotated[int, typer.Option(min=1, max=1000, help="Its share where tenants compete.")] = 1,
    quota: Quota = None,
    as_json: Json = False,
) -> None:
    """Create a tenant."""
    quotas = _quotas(quota)
    with connect() as client:
        answer = client.create_tenant(slug, weight=weight, quotas=quotas or None)
    print_done(answer, f"created {slug}; its first key: tocsin --tenant {slug} key create --role admin", as_json)


@app.command("list")
def list_(limit: Limit = DEFAULT_LIMIT, as_json: Json = False) -> None:
    """List tenants."""
    with connect() as client:
        print_list(client.list_tenants(limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


def _fields(tenant: Document) -> Fields:
    yield "slug", tenant["slug"]
    yield "state", _state(tenant)
    yield "weight", str(tenant.get("weight", ""))
    yield "quotas", pairs(_set(tenant)) or "none"
    yield "http allow", ", ".join(tenant.get("http_allow") or []) or "none"
    yield "retention", pairs(tenant.get("retention"))
    uses = dict(tenant.get("usage") or {})
    if "log_bytes_per_day" not in _set(tenant):
        uses.pop("log_bytes_today", None)  # it is counted for the quota only; `usage` knows
    yield "uses", pairs(uses)
    yield "created", local(tenant.get("created_at"))


@app.command()
def show(slug: Slug, as_json: Json = False) -> None:
    """Show a tenant, its quotas and what it uses; your own needs no platform key."""
    with connect() as client:
        print_document(client.get_tenant(slug), _fields, as_json)


@app.command()
def usage(slug: Slug, as_json: Json = False) -> None:
    """Show what a tenant uses beside its quotas; your own needs no platform key."""
    with connect() as client:
        print_document(client.get_usage(slug), _used, as_json)


def _used(usage: Document) -> Fields:
    for name in ("jobs", "queued", "running"):
        yield name, _of(usage[name], str)
    yield "logged today", _of(usage["log_bytes_today"], size)
    day, stored = usage["last_day"], usage["stored"]
    did = f"{day['submitted']} submitted, {day['ran']} ran, {day['failed']} failed"
    yield "last day", f"{did} (since {local(day['since'])})"
    yield "archived", f"{size(stored['history_bytes'])} of history, {size(stored['audit_bytes'])} of audit"
    yield "logs", size(stored["log_bytes"])
    yield "payloads", str(stored["payloads"])


def _of(share: Document, words: Callable[[int], str]) -> str:
    most = share["quota"]
    return words(share["used"]) + ("" if most is None else f" of {words(most)}")


@app.command("set")
def set_(
    slug: Slug,
    weight: Annotated[int | None, typer.Option(min=1, max=1000, help="Its share where tenants compete.")] = None,
    quota: Quota = None,
    http_allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A private host or network that its http jobs may call; none of any other. `none` takes all away.",
            metavar="HOST|NETWORK",
        ),
    ] = None,
    runs_days: Annotated[
        int | None,
        typer.Option(min=0, help="Keep its archived runs for so long; 0: as the server does.", metavar="DAYS"),
    ] = None,
    legal_hold: Annotated[
        bool | None, typer.Option("--legal-hold/--no-legal-hold", help="Let none of its records go.")
    ] = None,
    hot_days: Annotated[
        int | None,
        typer.Option(min=0, help="Archive its runs and audit after so long; 0: when the server does.", metavar="DAYS"),
    ] = None,
    logs_days: Annotated[
        int | None, typer.Option(min=0, help="Keep its logs for so long; 0: as the server does.", metavar="DAYS")
    ] = None,
    audit_days: Annotated[
        int | None,
        typer.Option(min=0, help="Keep its archived audit for so long; 0: as the server does.", metavar="DAYS"),
    ] = None,
    preset: Annotated[
        Literal["compliance"] | None, typer.Option(help="compliance: seven years of runs, logs and audit.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a tenant's weight, quotas, whom within the platform's walls its http jobs may call, or how long its
    records are kept. An admin may set --runs-days and --logs-days of its own tenant."""
    quotas = _quotas(quota)
    days = {"runs_days": runs_days, "hot_days": hot_days, "logs_days": logs_days, "audit_days": audit_days}
    retention: dict[str, object] = {name: number or None for name, number in days.items() if number is not None}
    retention |= {} if legal_hold is None else {"legal_hold": legal_hold}
    retention |= {} if preset is None else {"preset": preset}
    if weight is None and not quotas and not http_allow and not retention:
        raise typer.BadParameter("say what to change: see --help")
    allow = [] if http_allow == ["none"] else http_allow or None
    with connect() as client:
        answer = client.update_tenant(
            slug, weight=weight, quotas=quotas or None, http_allow=allow, retention=retention or None
        )
    print_done(answer, f"changed {slug}", as_json)


@app.command()
def suspend(slug: Slug, reason: Reason = "", as_json: Json = False) -> None:
    """Let nothing more of a tenant start; what runs goes on to its end, and all is kept."""
    with connect() as client:
        print_done(client.suspend_tenant(slug, reason), f"suspended {slug}", as_json)


@app.command()
def resume(slug: Slug, reason: Reason = "", as_json: Json = False) -> None:
    """Let a suspended tenant go on."""
    with connect() as client:
        print_done(client.resume_tenant(slug, reason), f"resumed {slug}", as_json)


@app.command()
def erase(
    slug: Slug,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it is gone.")] = False,
    as_json: Json = False,
) -> None:
    """Erase a tenant with all that it has: jobs, runs, logs, archives, secrets, keys, audit. Nothing brings it back."""
    with connect() as client:
        if not yes:
            _ask(slug, client.get_tenant(slug))
        answer = client.erase_tenant(slug)
        if wait:
            _follow(client, slug)
    done = f"erased {slug}" if wait else f"erasing {slug}; how far it is: tocsin tenant show {slug}"
    print_done(answer, done, as_json)


def _ask(slug: str, tenant: Document) -> None:
    """By its name, so that nobody erases the wrong one."""
    if not _at_a_terminal():
        raise typer.BadParameter(f"everything of {slug} would go; say --yes", param_hint="SLUG")
    has = pairs({name: tenant["usage"][name] for name in ("jobs", "queued", "running")})
    typer.echo(
        plain(f"{slug} has {has}, with history, logs, secrets, keys and its audit. Nothing brings it back."), err=True
    )
    if typer.prompt("To erase all of it, type its name", err=True) != slug:
        raise typer.Abort


def _at_a_terminal() -> bool:
    return sys.stdin.isatty()


def _follow(client: "Client", slug: str) -> None:
    """Until there is no such tenant."""
    from tocsin.client.core import ApiError

    def fetch() -> Document:
        try:
            return client.get_tenant(slug)
        except ApiError as error:
            if error.status != 404:
                raise
            return {}

    try:
        follow(fetch, lambda tenant: Step(0, None, _state(tenant) if tenant else "gone", ended=not tenant), slug)
    except KeyboardInterrupt:
        typer.echo(f"it goes on; tocsin tenant show {slug}", err=True)
        raise


def _quotas(given: list[str] | None) -> dict[str, int | str | None]:
    return {name: _quota(name, value) for name, value in assignments(given, "--quota").items()}


def _quota(name: str, value: str) -> int | str | None:
    if value == "none":
        return None
    if name in _NUMBERS:
        if not value.isascii() or not value.isdigit():
            raise typer.BadParameter(f"{name} is a number, or none", param_hint="--quota")
        return int(value)
    return value
