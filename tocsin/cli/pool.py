"""`tocsin pool`: what waits for workers, and by which order it goes."""

from typing import Annotated

import typer

from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, connect, noun, page_size
from tocsin.cli.text import milliseconds, when

app = noun("See, set, pause and resume pools.")

Name = Annotated[str, typer.Argument(help="The pool's name.", metavar="POOL", show_default=False)]
Reason = Annotated[str, typer.Option(help="Why, for the audit.")]


def _state(pool: Document) -> str:
    return "paused" if pool.get("paused_at") else "active"


def _running(pool: Document) -> int:
    depth = pool.get("depth") or {}
    return int(depth.get("running", 0)) + int(depth.get("stopping", 0))


COLUMNS = [
    Column("NAME", lambda pool: pool["name"], whole=True),
    Column("STATE", _state, whole=True),
    Column("POLICY", lambda pool: pool.get("policy")),
    Column("DUE", lambda pool: pool.get("due")),
    Column("RUNNING", _running),
    Column("LAG", lambda pool: milliseconds(pool.get("lag_ms"))),
    Column("WORKERS", lambda pool: pool.get("workers")),
    Column("WANTED", lambda pool: pool.get("wanted_workers"), spare=True),
    Column("SLOTS", lambda pool: pool.get("slots"), spare=True),
]


def _fields(pool: Document) -> Fields:
    yield "name", pool["name"]
    yield "state", _state(pool)
    yield "paused", when(pool.get("paused_at"), now())
    yield "open to", "all tenants" if pool.get("tenants") is None else ", ".join(pool["tenants"]) or "nobody"
    yield "policy", pool.get("policy") or ""
    yield "head start", f"{pool.get('head_start')} for each point of priority"
    yield "worst-case wait", f"{pool.get('worst_case_wait')} behind what comes later"
    yield "depth", ", ".join(f"{count} {state}" for state, count in (pool.get("depth") or {}).items())
    yield "due", str(pool.get("due", ""))
    yield "oldest due", when(pool.get("oldest_due_at"), now())
    yield "lag", milliseconds(pool.get("lag_ms"))
    yield "workers", str(pool.get("workers", ""))
    yield "slots", str(pool.get("slots", ""))
    yield "wanted workers", "" if pool.get("wanted_workers") is None else str(pool["wanted_workers"])


@app.command("list")
def list_(limit: Limit = DEFAULT_LIMIT, as_json: Json = False) -> None:
    """List pools."""
    with connect() as client:
        print_list(client.list_pools(limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)


@app.command()
def show(pool: Name, as_json: Json = False) -> None:
    """Show one pool."""
    with connect() as client:
        print_document(client.get_pool(pool), _fields, as_json)


@app.command("set")
def set_(
    pool: Name,
    policy: Annotated[
        str | None,
        typer.Option(help="fair (tenants by weight), priority or fifo (all runs in one order).", metavar="POLICY"),
    ] = None,
    head_start: Annotated[
        str | None,
        typer.Option(help="What one point of priority is worth, such as 20ms, for new runs.", metavar="DURATION"),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option("--tenant", help="A tenant that may use it, by its slug; all others may not.", metavar="SLUG"),
    ] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Every tenant may use it.")] = False,
    as_json: Json = False,
) -> None:
    """Say who goes first, and who may use it; needs a platform key. Runs that are there keep their places."""
    if policy is None and head_start is None and not tenant and not all_tenants:
        raise typer.BadParameter("say --policy, --head-start, --tenant or --all-tenants")
    if tenant and all_tenants:
        raise typer.BadParameter("say either --tenant or --all-tenants")
    if policy not in (None, "fair", "priority", "fifo"):
        raise typer.BadParameter("is fair, priority or fifo", param_hint="--policy")
    with connect() as client:
        print_done(
            client.update_pool(
                pool,
                policy=policy,  # type: ignore[arg-type]
                head_start=head_start,
                tenants="all" if all_tenants else tenant or None,
            ),
            f"changed {pool}",
            as_json,
        )


@app.command()
def pause(pool: Name, reason: Reason = "", as_json: Json = False) -> None:
    """Let nothing more start from a pool; what runs goes on. Needs a platform key."""
    with connect() as client:
        print_done(client.pause_pool(pool, reason), f"paused {pool}", as_json)


@app.command()
def resume(pool: Name, reason: Reason = "", as_json: Json = False) -> None:
    """End a pool's pause."""
    with connect() as client:
        print_done(client.resume_pool(pool, reason), f"resumed {pool}", as_json)
