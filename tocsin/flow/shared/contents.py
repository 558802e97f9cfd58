"""What a job's target says to what it runs (`body`, `args`, `kwargs`, `stdin`), where that does not stand in the job's
document: sealed beside it if the job is sensitive, in object storage if it is large, or both.

Who reads the document sees a reference in its place, which may be sent back like everything else in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from tocsin.errors import ApiProblem, InvalidInput, ServerFault
from tocsin.flow.shared.parcels import Parcels, Use
from tocsin.flow.shared.sealing import KEY_GONE, DataKeys
from tocsin.model.job import JobSpec
from tocsin.model.packed import LARGE, Parcel, in_place, parcel_in, parcels_in, parcels_of
from tocsin.model.targets import Target, content_of, with_content
from tocsin.store.vault import context_of, seal, unseal

_SEALED = re.compile(r"([0-9]{1,9})([.@])(.+)", re.ASCII)  # the key's number, then in base64 or as a parcel
_MAY_LEAVE: dict[str, type] = {"body": object, "kwargs": dict, "args": list}  # what else is said has bounds of its own


def uses_of(tenant_id: int, job_id: str, spec: JobSpec) -> list[Use]:
    """What a job needs of object storage."""
    found = list(parcels_of(spec.target).values())
    if spec.sealed is not UNSET and (parcel := _sealed_parcel(spec.sealed)) is not None:
        found.append(parcel)
    return [Use(tenant_id, parcel.place(tenant_id), job_id) for parcel in found]


def _sealed_parcel(sealed: str) -> Parcel | None:
    match = _SEALED.fullmatch(sealed)
    return parcel_in(match[3]) if match is not None and match[2] == "@" else None


class Contents:
    """Keeps it and reads it."""

    def __init__(self, keys: DataKeys, parcels: Parcels) -> None:
        self._keys, self._parcels = keys, parcels

    # ── kept ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def keep(self, tenant_id: int, spec: JobSpec, old: JobSpec | None = None) -> JobSpec:
        """A document as it is stored. What is the same as in `old` is kept as that has it."""
        if spec.sensitive is True:
            return await self._sealed(tenant_id, spec, old)
        kept = {}
        for name, value in content_of(spec.target).items():
            parcel = await self._parcel(tenant_id, name, value, old) if name in _MAY_LEAVE else None
            if parcel is not None:
                kept[name] = in_place(name, parcel)
        return _replaced(spec, msgspec.structs.replace(spec.target, **kept)) if kept else spec

    async def _parcel(self, tenant_id: int, name: str, value: Any, old: JobSpec | None) -> Parcel | None:
        """Where a part that is too large for the document lies."""
        data = msgspec.json.encode(value)
        if len(data) <= LARGE:
            return None
        if old is not None:
            known = parcels_of(old.target).get(name)
            if known is not None and await self._is(tenant_id, known, data):
                return known
            if known is None and _same(getattr(old.target, name, None), value):
                return None  # from before there were any; a document that is given again is no other
        return await self._parcels.put(tenant_id, data) if await self._parcels.understood() else None

    async def _is(self, tenant_id: int, parcel: Parcel, data: bytes) -> bool:
        if parcel.size != len(data) or parcel.sha256 == hashlib.sha256(data).hexdigest():
            return parcel.size == len(data)
        found = await self._read(tenant_id, parcel)
        return not isinstance(found, ApiProblem) and _same(found, msgspec.json.decode(data))

    async def _sealed(self, tenant_id: int, spec: JobSpec, old: JobSpec | None) -> JobSpec:
        """What is said anew takes the place of what was sealed before."""
        before = {} if spec.sealed is UNSET else await self._opened_or_refused(tenant_id, spec.sealed)
        content = content_of(with_content(spec.target, before | content_of(spec.target)))
        sealed: str | msgspec.UnsetType = UNSET
        if content and old is not None and old.sealed is not UNSET:
            sealed = old.sealed if _same(await self.unsealed(tenant_id, old.sealed), content) else UNSET
        if content and sealed is UNSET:
            number, key = await self._keys.current(tenant_id)
            data = seal(key, msgspec.json.encode(content), _context(tenant_id))
            if len(data) > LARGE and await self._parcels.understood():
                sealed = f"{number}@{(await self._parcels.put(tenant_id, data)).text}"
            else:
                sealed = f"{number}.{base64.b64encode(data).decode()}"
        return msgspec.structs.replace(spec, target=with_content(spec.target, {}), sealed=sealed)

    async def _opened_or_refused(self, tenant_id: int, sealed: str) -> dict[str, Any]:
        found = await self.unsealed(tenant_id, sealed)
        if isinstance(found, ServerFault):
            raise InvalidInput.field("sealed", "invalid", "is nothing that this server has sealed for you")
        if isinstance(found, ApiProblem):
            raise found
        return found

    # ── read ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def whole(self, tenant_id: int, spec: JobSpec) -> JobSpec:
        """A document with all that its target says, save what is sealed; a reference that leads nowhere is refused."""
        content = await self._read_or_refused(tenant_id, parcels_of(spec.target))
        return _replaced(spec, msgspec.structs.replace(spec.target, **content)) if content else spec

    async def merging(self, tenant_id: int, patch: dict[str, Any]) -> dict[str, Any]:
        """The same for what is to be merged with a document."""
        target = patch.get("target")
        if not isinstance(target, dict):
            return patch
        fields = {name: target[name] for name in _MAY_LEAVE if name in target}
        return patch | {"target": target | await self._read_or_refused(tenant_id, parcels_in(fields))}

    async def _read_or_refused(self, tenant_id: int, parcels: Mapping[str, Parcel]) -> dict[str, Any]:
        content = {}
        for name, parcel in parcels.items():
            value = await self._read(tenant_id, parcel)
            if isinstance(value, ServerFault) or not isinstance(value, ApiProblem | _MAY_LEAVE[name]):
                why = "is nothing that this server keeps for you"
                raise InvalidInput.field(f"target.{name}", "unknown_payload", why)
            if isinstance(value, ApiProblem):
                raise value
            content[name] = value
        return content

    async def content(self, tenant_id: int, spec: JobSpec) -> dict[str, Any] | ApiProblem:
        """All that a target says of which something does not stand in its document, or why it cannot be read."""
        if spec.sealed is not UNSET:
            return await self.unsealed(tenant_id, spec.sealed)
        content = content_of(spec.target)
        for name, parcel in parcels_of(spec.target).items():
            value = await self._read(tenant_id, parcel)
            if isinstance(value, ApiProblem):
                return value
            content[name] = value
        return content

    async def unsealed(self, tenant_id: int, sealed: str) -> dict[str, Any] | ApiProblem:
        """What a sensitive target says, or why that cannot be read."""
        match = _SEALED.fullmatch(sealed)
        parcel = _sealed_parcel(sealed)
        if match is None or (match[2] == "@" and parcel is None):
            return KEY_GONE
        id_ = (tenant_id, int(match[1]))
        key = (await self._keys.read([id_]))[id_]
        if isinstance(key, ApiProblem):
            return key
        try:
            if parcel is not None:
                data = await self._parcels.get(parcel.place(tenant_id), parcel.sha256)
            else:
                data = base64.b64decode(match[3], validate=True)
            found: dict[str, Any] = msgspec.json.decode(unseal(key, data, _context(tenant_id)))
        except ApiProblem as problem:
            return problem
        except ValueError:  # no base64
            return KEY_GONE
        return found

    async def _read(self, tenant_id: int, parcel: Parcel) -> Any | ApiProblem:
        try:
            return msgspec.json.decode(await self._parcels.get(parcel.place(tenant_id), parcel.sha256))
        except ApiProblem as problem:
            return problem
        except ValueError:  # it is there, and is sealed
            return ServerFault("this payload cannot be read", code="payload_broken")


def _replaced(spec: JobSpec, target: Target) -> JobSpec:
    return msgspec.structs.replace(spec, target=target)


def _same(one: Any, other: Any) -> bool:
    """As JSON: 1 is not true, though Python says so; the order of keys does not matter."""
    if isinstance(one, ApiProblem):
        return False
    return msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")


def _context(tenant_id: int) -> bytes:
    return context_of("target", tenant_id)
