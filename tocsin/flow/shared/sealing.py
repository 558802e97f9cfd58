"""What several steps know of secrets and sealed things: whether there is a secret, and with which key a tenant's
sensitive arguments are sealed.

That key is one of the tenant's own, wrapped by a master key. Sealed arguments are copied from row to row, into history
and archives; a new master key means to wrap this one key anew and leaves all of them as they are.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from tocsin.errors import ApiProblem, InvalidInput, ServerFault, Unavailable
from tocsin.model.job import JobSpec
from tocsin.model.targets import content_of, with_content
from tocsin.store.db import Connection, Database, Sql, columns
from tocsin.store.vault import MasterKeys, Wrapped, context_of, new_key, seal, unseal

SQL = Sql(__file__)
_CURRENT = 1  # the number of the data key that is sealed with
_MOST_KNOWN = 10_000
DataKeyId = tuple[int, int]  # tenant, number
_GONE = ServerFault("the key that this was sealed with is gone", code="seal_broken")


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
        return {id_: found.get(id_, _GONE) for id_ in wanted}

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


# ── what a sensitive job says itself ─────────────────────────────────────────────────────────────────────────────


async def seal_target(keys: DataKeys, tenant_id: int, spec: JobSpec, old: JobSpec | None = None) -> JobSpec:
    """A job's document without what a sensitive target says, which is sealed beside it. What is said anew takes the
    place of what was sealed before; the same as `old` has is kept as that has it."""
    if spec.sensitive is not True:
        return spec
    before = {} if spec.sealed is UNSET else await _opened_or_refused(keys, tenant_id, spec.sealed)
    content = content_of(with_content(spec.target, before | content_of(spec.target)))
    sealed: str | msgspec.UnsetType = UNSET
    if content and old is not None and old.sealed is not UNSET:
        sealed = old.sealed if await open_target(keys, tenant_id, old.sealed) == content else UNSET
    if content and sealed is UNSET:
        number, key = await keys.current(tenant_id)
        data = seal(key, msgspec.json.encode(content), _target_context(tenant_id))
        sealed = f"{number}.{base64.b64encode(data).decode()}"
    return msgspec.structs.replace(spec, target=with_content(spec.target, {}), sealed=sealed)


async def open_target(keys: DataKeys, tenant_id: int, sealed: str) -> dict[str, Any] | ApiProblem:
    """What a target says, or why that cannot be read."""
    number, _, text = sealed.partition(".")
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        return _GONE
    id_ = (tenant_id, int(number))
    key = (await keys.read([id_]))[id_]
    if isinstance(key, ApiProblem):
        return key
    try:
        found: dict[str, Any] = msgspec.json.decode(
            unseal(key, base64.b64decode(text, validate=True), _target_context(tenant_id))
        )
    except ApiProblem as problem:
        return problem
    except ValueError:  # no base64
        return _GONE
    return found


async def _opened_or_refused(keys: DataKeys, tenant_id: int, sealed: str) -> dict[str, Any]:
    found = await open_target(keys, tenant_id, sealed)
    if isinstance(found, ServerFault):
        raise InvalidInput.field("sealed", "invalid", "is nothing that this server has sealed for you")
    if isinstance(found, ApiProblem):
        raise found
    return found


def _target_context(tenant_id: int) -> bytes:
    return context_of("target", tenant_id)
