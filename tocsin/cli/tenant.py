"""`tocsin tenant`: who shares this Tocsin (platform keys only)."""

from typing import Annotated

import typer

from tocsin.cli.output import Column, print_done, print_list
from tocsin.cli.shared import DEFAULT_LIMIT, Json, Limit, connect, noun, page_size
from tocsin.cli.text import local

app = noun("Look after tenants; needs a platform key.")

COLUMNS = [
    Column("SLUG", lambda tenant: tenant["slug"], whole=True),
    Column("WEIGHT", lambda tenant: tenant.get("weight")),
    Column("CREATED", lambda tenant: local(tenant.get("created_at"))),
]


@app.command()
def create(
    slug: Annotated[str, typer.Argument(help="Its short name: a-z, 0-9 and hyphens.", show_default=False)],
    weight: Annotated[int, typer.Option(min=1, max=1000, help="Its share where tenants compete.")] = 1,
    as_json: Json = False,
) -> None:
    """Create a tenant."""
    with connect() as client:
        answer = client.create_tenant(slug, weight=weight)
    print_done(answer, f"created {slug}; its first key: tocsin --tenant {slug} key create --role admin", as_json)


@app.command("list")
def list_(limit: Limit = DEFAULT_LIMIT, as_json: Json = False) -> None:
    """List tenants."""
    with connect() as client:
        print_list(client.list_tenants(limit=page_size(limit)), COLUMNS, limit=limit, as_json=as_json)
