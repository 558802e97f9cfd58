"""What several steps know of secrets and sealed things: whether there is a secret, and a tenant's data key."""

from __future__ import annotations

from collections.abc import Mapping

from tocsin.errors import InvalidInput
from tocsin.store.db import Connection, Sql, columns
from tocsin.store.vault import context_of

SQL = Sql(__file__)


def data_key_context(tenant_id: int, id_: int) -> bytes:
    """What a tenant's wrapped data key is bound to."""
    return context_of("data key", tenant_id, id_)


async def unknown_secrets(
    connection: Connection, named: Mapping[int, tuple[int, Mapping[str, str]]]
) -> dict[int, InvalidInput]:
    """Of jobs (a number → tenant and `secrets`) those that name a secret that there is not, and which."""
    wanted = sorted({(tenant_id, name) for tenant_id, secrets in named.values() for name in secrets.values()})
    if not wanted:
        return {}
    known = {tuple(row) for row in await connection.fetch(SQL["known_secrets"], *columns(wanted, 2))}
    return {
        i: InvalidInput.field(f"secrets.{variable}", "unknown_secret", f"there is no secret {name!r}")
        for i, (tenant_id, secrets) in named.items()
        for variable, name in secrets.items()
        if (tenant_id, name) not in known
    }
