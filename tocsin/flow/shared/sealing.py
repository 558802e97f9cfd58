"""What several steps know of secrets and sealed things: whether there is a secret, and with which key a tenant's
sensitive arguments are sealed.

That key is one of the tenant's own, wrapped by a master key. Sealed arguments are copied from row to row, into history
and archives; a new master key means to wrap this one key anew and leaves all of them as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tocsin.errors import ApiProblem, InvalidInput, ServerFault, Unavailable
from tocsin.store.db import Connection, Database, Sql, columns
from tocsin.store.vault import MasterKeys, Wrapped, context_of, new_key

SQL = Sql(__file__)
_CURRENT = 1  # the number of the data key that is sealed with
_MOST_KNOWN = 10_000
DataKeyId = tuple[int, int]  # tenant, number
KEY_GONE = ServerFault("the key that this was sealed with is gone", code="seal_broken")


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


def args_context(tenant_id: int, job_id: str) -> bytes:
    """What sealed arguments are bound to: they go with the job's runs, and to no other job."""
    return context_of("args", tenant_id, job_id)


class DataKeys:
    """The keys of tenants, unwrapped and remembered."""

    def __init__(self, db: Database, keys: MasterKeys) -> None:
        self._db, self._keys = db, keys
        self._known: dict[DataKeyId, bytes] = {}

    async def current(self, tenant_id: int) -> tuple[int, bytes]:
        """The number and the key to seal with; made when it is first asked for, and committed before it is used: what
        is sealed with a key that is not kept is lost."""
        wanted = tenant_id, _CURRENT
        found = (await self._find([wanted])).get(wanted)
        if found is None:
            wrapped = self._keys.wrap(new_key(), data_key_context(*wanted))
            await self._db.fetch("vital", SQL["add_data_key"], *wanted, *wrapped)
            found = (await self.read([wanted]))[wanted]
        if isinstance(found, ApiProblem):
            raise found
        return _CURRENT, found

    async def read(self, wanted: Collection[DataKeyId]) -> dict[DataKeyId, bytes | ApiProblem]:
        """These keys, or why they cannot be read; what is known costs nothing."""
        found = await self._find(wanted)
        return {id_: found.get(id_, KEY_GONE) for id_ in wanted}

    async def _find(self, wanted: Collection[DataKeyId]) -> dict[DataKeyId, bytes | ApiProblem]:
        found: dict[DataKeyId, bytes | ApiProblem] = {id_: self._known[id_] for id_ in wanted if id_ in self._known}
        missing = [id_ for id_ in wanted if id_ not in found]
        for row in await self._db.fetch("vital", SQL["data_key"], *columns(missing, 2)) if missing else ():
            id_ = (row["tenant_id"], row["id"])
            found[id_] = self._unwrapped(id_, Wrapped(row["key_id"], row["wrapped"]))
        return found

    def _unwrapped(self, id_: DataKeyId, wrapped: Wrapped) -> bytes | ApiProblem:
        try:
            key = self._keys.unwrap(wrapped, data_key_context(*id_))
        except (Unavailable, ServerFault) as problem:
            return problem
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[id_] = key
        return key
