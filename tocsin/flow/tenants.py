"""tenants: who shares this Tocsin, by what terms, and who of them is suspended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from tocsin.clock import iso
from tocsin.errors import Conflict, Forbidden, InvalidInput, NotFound
from tocsin.flow.shared import audit
from tocsin.flow.shared.idempotency import Wish, recall, remember
from tocsin.model.access import OWN_TERMS, Identity
from tocsin.model.addresses import check_entry
from tocsin.model.limits import BadLimit, parse_rate
from tocsin.model.quotas import NO_QUOTAS, Quotas
from tocsin.store.db import Database, Row, Sql
from tocsin.wire import NewTenant, QuotaPatch, RetentionPatch, TenantPatch

SQL = Sql(__file__)
_SEVEN_YEARS = 7 * 365 + 2
_PRESETS = {"compliance": dict.fromkeys(("runs_days", "logs_days", "audit_days"), _SEVEN_YEARS)}


async def act_for(db: Database, who: Identity, slug: str) -> Identity:
    """The same caller, acting for another tenant: for platform keys only."""
    if who.role != "platform":
        raise Forbidden("only a platform key may act for another tenant")
    row = await db.fetchrow("engine", SQL["find"], slug)
    if row is None:
        raise _unknown()
    _refuse_erasing(row)
    return who._replace(tenant_id=row["id"], tenant=row["slug"], quotas=Quotas.given(row), home_id=who.home)


async def member(db: Database, slug: str, who: Identity) -> Identity | None:
    """The same caller as one of this tenant, whatever it was before; None if there is no such tenant."""
    row = await db.fetchrow("engine", SQL["find"], slug)
    if row is None or row["erasing"] is not None:
        return None
    suspended = row["suspended_at"] is not None
    return who._replace(tenant_id=row["id"], tenant=row["slug"], quotas=Quotas.given(row), suspended=suspended)


async def create_tenant(db: Database, who: Identity, body: NewTenant, wish: Wish | None = None) -> dict[str, Any]:
    """A new tenant."""
    quotas = _changed(NO_QUOTAS, body.quotas)
    async with db.transaction("tenants") as connection:
        await recall(connection, wish)
        row = await connection.fetchrow(SQL["add"], body.slug, body.weight, *quotas)
        if row is None:
            raise Conflict(f"tenant {body.slug!r} exists already", code="name_taken")
        await audit.record(connection, audit.platform_entry(who, "tenant.create", f"tenant:{body.slug}"))
        await remember(connection, wish, 201, [])
    return _document(row)


async def change_tenant(
    db: Database, who: Identity, slug: str, patch: TenantPatch, usual: Mapping[str, int], wish: Wish | None = None
) -> None:
    """Another weight, other quotas, a list of allowed hosts or how long records are kept; every node goes by them
    within a second or two, by the list at once. `usual`: for how long the server keeps what an admin may turn."""
    if who.role != "platform":
        _refuse_terms(patch)
    async with db.transaction("tenants") as connection:
        await recall(connection, wish)
        was = await connection.fetchrow(SQL["lock"], slug)
        if was is None:
            raise _unknown()
        _refuse_erasing(was)
        if who.role != "platform":
            _refuse_beyond(_named(patch.retention), was, usual)
        weight = was["weight"] if patch.weight is UNSET else patch.weight
        quotas = _changed(Quotas.of(was), patch.quotas)
        allow = was["http_allow"] if patch.http_allow is UNSET else _allowed(patch.http_allow)
        kept = _retention(was) | _named(patch.retention)
        await connection.execute(SQL["change"], slug, weight, *quotas, allow, *kept.values())
        detail = {"weight": weight, "quotas": quotas._asdict(), "http_allow": allow, "retention": kept}
        entry = audit.platform_entry(who, "tenant.update", f"tenant:{slug}", **detail)
        await audit.record(connection, entry)
        await remember(connection, wish, 200, [])


def _refuse_terms(patch: TenantPatch) -> None:
    """An admin changes what harms nobody but its own tenant."""
    for term in sorted(_terms(patch)):
        if term not in OWN_TERMS:
            raise _not_yours(term, "only a platform key may change this")


def _terms(patch: TenantPatch) -> Iterator[str]:
    """What a patch names, by its path."""
    for name in patch.__struct_fields__:
        value = getattr(patch, name)
        if isinstance(value, QuotaPatch | RetentionPatch):
            yield from (f"{name}.{one}" for one in value.__struct_fields__ if getattr(value, one) is not UNSET)
        elif value is not UNSET:
            yield name


def _refuse_beyond(named: Mapping[str, int | None], was: Row, usual: Mapping[str, int]) -> None:
    """Within what the server does for everybody: longer is for the platform to grant, and what it has granted, or asked
    for, to take away."""
    for name, days in named.items():
        if days is not None and days > usual[name]:
            raise _not_yours(f"retention.{name}", f"is at most {usual[name]}, as long as the server keeps them")
        if was[name] is not None and was[name] > usual[name]:
            raise _not_yours(f"retention.{name}", "the platform has them kept for longer than usual; ask there")


def _not_yours(path: str, why: str) -> Forbidden:
    return Forbidden(f"{path}: {why}", errors=[{"path": path, "code": "forbidden", "message": why}])


async def switch(
    db: Database,
    who: Identity,
    slug: str,
    verb: Literal["suspend", "resume"],
    reason: str,
    wish: Wish | None = None,
) -> None:
    """Suspend a tenant, or let it go on. Claims that begin after the commit start nothing of a suspended one; what runs
    goes on to its end, and its keys only read. Its time passes as if no worker were there: when it goes on, what is
    late goes by the `misfire` of its jobs."""
    async with db.transaction("tenants") as connection:
        await recall(connection, wish)
        was = await connection.fetchrow(SQL["lock"], slug)
        if was is None:
            raise _unknown()
        _refuse_erasing(was)
        if (was["suspended_at"] is None) == (verb == "suspend"):
            await connection.execute(SQL["suspend"] if verb == "suspend" else SQL["resume"], slug)
            entry = audit.platform_entry(who, f"tenant.{verb}", f"tenant:{slug}", reason=reason)
            await audit.record(connection, entry)
        await remember(connection, wish, 200, [])


def _changed(quotas: Quotas, patch: QuotaPatch | UnsetType) -> Quotas:
    """Those that are named are set, or taken away by null."""
    if patch is UNSET:
        return quotas
    given = {name: value for name in Quotas._fields if (value := getattr(patch, name)) is not UNSET}
    if given.get("submit_rate") is not None:
        try:
            parse_rate(given["submit_rate"])
        except BadLimit as error:
            raise InvalidInput.field("quotas.submit_rate", "invalid", str(error)) from None
    return quotas._replace(**given)


def _retention(row: Row) -> dict[str, Any]:
    """In the order of `change`."""
    return {name: row[name] for name in ("runs_days", "legal_hold", "hot_days", "logs_days", "audit_days")}


def _named(patch: RetentionPatch | UnsetType) -> dict[str, Any]:
    """What of the retention is named, by itself or by a preset."""
    if patch is UNSET:
        return {}
    named = {name: value for name in patch.__struct_fields__ if (value := getattr(patch, name)) is not UNSET}
    return _PRESETS.get(named.pop("preset", ""), {}) | named


def _allowed(entries: list[str]) -> list[str]:
    """The hosts and networks of ours that a tenant's http jobs may call."""
    for i, entry in enumerate(entries):
        try:
            check_entry(entry)
        except ValueError as error:
            raise InvalidInput.field(f"http_allow[{i}]", "invalid", str(error)) from None
    return entries


async def http_allow(db: Database, tenant_ids: Iterable[int]) -> dict[int, list[str]]:
    """Those lists, of the tenants that have one."""
    return {row["id"]: row["http_allow"] for row in await db.fetch("vital", SQL["http_allow"], list(tenant_ids))}


async def get_tenant(db: Database, slug: str) -> dict[str, Any]:
    """One tenant's document."""
    row = await db.fetchrow("engine", SQL["find"], slug)
    if row is None:
        raise _unknown()
    return _document(row)


async def list_tenants(db: Database, before: int | None, limit: int) -> list[dict[str, Any]]:
    """Newest first."""
    return [_document(row) for row in await db.fetch("engine", SQL["list"], before, limit)]


def _document(row: Row) -> dict[str, Any]:
    return {
        "id": row["id"],
        "slug": row["slug"],
        "weight": row["weight"],
        "quotas": Quotas.of(row)._asdict(),
        "http_allow": row["http_allow"],
        "retention": _retention(row),
        "created_at": iso(row["created_at"]),
        "suspended_at": row["suspended_at"] and iso(row["suspended_at"]),
        "erasure": _erasure(row),
    }


def _erasure(row: Row) -> dict[str, Any] | None:
    """How far it is."""
    if row.get("erasing") is None:
        return None
    told = {"state": row["erasing"], "asked_at": iso(row["asked_at"]), "asked_by": row["actor"]}
    return told | {"rows": row["rows"], "objects": row["objects"]}


def _refuse_erasing(row: Row) -> None:
    if row["erasing"] is not None:
        raise Conflict(f"tenant {row['slug']!r} is being erased", code="tenant_erasing")


def _unknown() -> NotFound:
    return NotFound("there is no such tenant")
