"""Who calls: by a key of ours, by a token of an issuer, by the session of a browser, or by the token of a run."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from tocsin.errors import Forbidden, NotFound, Unauthorized
from tocsin.flow import keys, tenants
from tocsin.model.access import Identity
from tocsin.model.oidc import looks_like_token

if TYPE_CHECKING:
    from tocsin.node.assemble import Node
    from tocsin.node.server.issuers import Bearer
    from tocsin.node.server.protocol import Request
    from tocsin.store.db import Database

# A key that was revoked is forgotten as soon as the news of it comes, and should that be lost, after so many seconds.
_KEY_TTL = 0.5
_MOST_KNOWN = 10_000
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


class _Stay(NamedTuple):
    """Until when somebody who came without a key may stay, by the database's clock, and when the earliest of his
    sessions began that was seen here."""

    until: float
    began: float


class Authenticator:
    """Keys, tokens and sessions to identities, remembered for a moment."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._known: dict[bytes, tuple[float, Identity]] = {}
        self._forgets = 0  # how often something was to be forgotten: what was read before that is not to be remembered
        self._used: dict[str, bytes | None] = {}
        self._stays: dict[str, _Stay] = {}  # of those who came without a key

    async def identify(self, request: Request) -> Identity:
        """Who calls; raises if nobody we know."""
        given = request.headers.get("authorization")
        if given is None and (bearer := self._node.logins.bearer(request)) is not None:
            who = await self._person(bearer)
        else:
            scheme, _, key = (given or "").partition(" ")
            if scheme.lower() != "bearer" or not key or "," in key:  # a comma: the header came twice
                raise _unauthorized("give one header `Authorization: Bearer <key>`")
            if key.startswith(keys.RUN_PREFIX):
                return self._attempt(request, key)
            who = await self._known_or_found(request, key)
        if (slug := request.headers.get("tocsin-tenant")) is not None:
            if not _SLUG.fullmatch(slug):
                raise NotFound("there is no such tenant")
            who = await tenants.act_for(self._node.db, who, slug)
        return who

    def _attempt(self, request: Request, token: str) -> Identity:
        """A run that calls with its own token: it is known in its own place alone."""
        who = self._node.gateway.tokens.read(token, request.params.get("id", ""))
        if who is None:
            self._node.edge.failed(request)
            raise _unauthorized("this is not the token of this run")
        return who

    async def _known_or_found(self, request: Request, key: str) -> Identity:
        fingerprint = hashlib.sha256(key.encode()).digest()
        now = time.monotonic()
        found = self._known.get(fingerprint)
        if found is not None and now - found[0] < _KEY_TTL:
            return found[1]
        forgets = self._forgets
        if found is None:
            self._node.edge.hold_back(request)
        if self._node.issuers and looks_like_token(key):
            who = await self._bearer(key)
        else:
            # A key that was good a moment ago does not queue up with the rest: a worker's heartbeat may wait for it.
            who = await self._holder(key, "engine" if found is None else "vital")
        if who is None:
            self._known.pop(fingerprint, None)
            self._node.edge.failed(request)
            raise _unauthorized("this key or token is not known here, or not good any more")
        self._remember(fingerprint, now, who, forgets)
        return who

    async def _holder(self, key: str, pool: str) -> Identity | None:
        holder = await keys.identify(self._node.db, self._node.key_hashes, key, pool)
        if holder is None:
            return None
        self._used[holder.who.key_id] = holder.anew
        return holder.who

    async def _bearer(self, token: str) -> Identity | None:
        bearer = await self._node.issuers.bearer(token, self._node.db.clock.now().timestamp())
        return None if bearer is None else await self._person(bearer)

    async def _person(self, bearer: Bearer) -> Identity:
        mark, now = f"{bearer.name}\n{bearer.fitting}\n{bearer.began}".encode(), time.monotonic()
        found = self._known.get(mark)
        if found is not None and now - found[0] < _KEY_TTL:
            self._stay(bearer)
            return found[1]
        forgets = self._forgets
        who = await person(self._node.db, bearer)
        if bearer.began is not None and await keys.logged_out(self._node.db, {bearer.id: bearer.began}):
            raise _unauthorized("you have logged out everywhere since this session began; log in again")
        self._stay(bearer)
        self._remember(mark, now, who, forgets)
        return who

    def _stay(self, bearer: Bearer) -> None:
        if len(self._stays) > _MOST_KNOWN:
            self._stays.clear()
        known = self._stays.get(bearer.id, _Stay(bearer.until, float("inf")))
        began = float("inf") if bearer.began is None else bearer.began
        self._stays[bearer.id] = _Stay(max(bearer.until, known.until), min(began, known.began))

    def _remember(self, mark: bytes, now: float, who: Identity, forgets: int) -> None:
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        if forgets == self._forgets:
            self._known[mark] = (now, who)

    def forget(self, key_ids: Collection[str]) -> None:
        """Look again at the next call with one of these."""
        self._forgets += 1
        self._known = {mark: known for mark, known in self._known.items() if known[1].key_id not in key_ids}
        for key_id in key_ids:
            self._stays.pop(key_id, None)

    async def living(self, key_ids: set[str]) -> set[str]:
        """Those of these keys, or of what stands for one, that still open the door."""
        now = self._node.db.clock.now().timestamp()
        stays = {key_id: self._stays[key_id] for key_id in key_ids if key_id in self._stays}
        people = {key_id for key_id, stay in stays.items() if stay.until > now}
        began = {key_id: stays[key_id].began for key_id in people if stays[key_id].began < now}
        over = await keys.logged_out(self._node.db, began)
        for key_id in over:  # who is back by then comes with another session
            self._stays.pop(key_id, None)
        others = key_ids - people
        return people - over | (await keys.living(self._node.db, others) if others else set())

    async def note_used(self) -> None:
        """Write down which keys were used since it was last asked."""
        used, self._used = self._used, {}
        if used:
            await keys.note_used(self._node.db, self._node.key_hashes, used)


async def person(db: Database, bearer: Bearer) -> Identity:
    """Whom an issuer vouches for, as the first of its rules says that fits; raises if none gives anything."""
    rule = bearer.issuer.granted(bearer.fitting)
    if rule is None:
        raise Forbidden("no rule of this server gives you a role; who runs it can add one", code="no_role")
    nobody = Identity(bearer.id, "", rule.role, 0, "", scope=rule.scope, subject=bearer.name)
    who = await tenants.member(db, rule.tenant, nobody)
    if who is None:
        raise Forbidden("the tenant of your rule does not exist; who runs this server can make it", code="no_role")
    return who


def _unauthorized(text: str) -> Unauthorized:
    return Unauthorized(text, headers={"www-authenticate": "Bearer"})
