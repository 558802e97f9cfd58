"""Issuers of OpenID Connect as this server knows them: what they publish, fetched and kept, and tokens held to it.

Fetched when first needed, over HTTPS, within bounds of time and size, following no redirect. Keys are looked for anew
every few minutes, and when a token names one that is not known, but never more often than every half minute, whatever
is asked for. An issuer that does not answer is believed by its last keys for an hour, which is longer than its tokens
live; then its bearers get 503, and nobody gets in.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import msgspec

from tocsin.errors import SetupError, Unavailable
from tocsin.model import oidc
from tocsin.model.oidc import Issuer, Refused, Token
from tocsin.telemetry import get_logger

if TYPE_CHECKING:
    from joserfc.jwk import Key

log = get_logger("oidc")
_FRESH_SECONDS, _KEPT_SECONDS, _AGAIN_SECONDS = 300.0, 3600.0, 30.0
_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 262_144
_MOST_KEYS = 100
_LEAST_MODULUS = 342  # characters: 2048 bits in base64
_KINDS = {"RS256": ("RSA", None), "PS256": ("RSA", None), "ES256": ("EC", "P-256"), "EdDSA": ("OKP", "Ed25519")}
_PEOPLE = uuid.UUID("5b3b1f0c-52a9-5a0e-8f43-8d9f0a9c3f5e")


class Endpoints(NamedTuple):
    """Where people log in."""

    authorization_endpoint: str
    token_endpoint: str


class _Published(msgspec.Struct):
    issuer: str
    jwks_uri: str
    authorization_endpoint: str = ""
    token_endpoint: str = ""


class Trusted:
    """One issuer, with what it publishes."""

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer
        self.client_secret = _secret(issuer.client_secret_file)
        self._keys: list[tuple[Mapping[str, Any], Key]] = []
        self._endpoints: Endpoints | None = None
        self._fetched_at = self._tried_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def verify(self, token: Token) -> None:
        """Refuse a token that was not signed by this issuer, in one of the ways that it signs."""
        if token.algorithm not in self.issuer.algorithms:
            raise Refused(f"its algorithm is {token.algorithm[:20]!r}")
        key = await self._key(token)
        from joserfc.errors import JoseError
        from joserfc.jws import JWSRegistry

        try:
            good = JWSRegistry.algorithms[token.algorithm].verify(token.signed, token.signature, key)
        except (JoseError, ValueError):
            good = False
        if not good:
            raise Refused("its signature is wrong")

    async def endpoints(self) -> Endpoints:
        """Where people log in; raises if the issuer does not say so, or not so that it could be believed."""
        await self._look()
        if self._endpoints is None or not all(map(oidc.is_safe_url, self._endpoints)):
            raise self._unavailable()
        return self._endpoints

    async def _key(self, token: Token) -> Key:
        await self._look()
        found = self._find(token)
        if found is None and self._may_try():  # it may have come to them since
            await self._refresh()
            found = self._find(token)
        if found is None:
            raise Refused("the issuer publishes no key of that name for that algorithm")
        return found

    def _find(self, token: Token) -> Key | None:
        kind, curve = _KINDS[token.algorithm]
        fitting = [
            key
            for told, key in self._keys
            if told["kty"] == kind
            and (curve is None or told.get("crv") == curve)
            and told.get("alg", token.algorithm) == token.algorithm
            and (token.key_id is None or told.get("kid") == token.key_id)
        ]
        return fitting[0] if len(fitting) == 1 else None

    # ── what it publishes ────────────────────────────────────────────────────────────────────────────────────────

    async def _look(self) -> None:
        """Have its keys, as fresh as they can be had; raises if they are too old to be believed."""
        age = time.monotonic() - self._fetched_at
        if age > _FRESH_SECONDS and self._may_try():
            refreshed = self._refresh()
            if age > _KEPT_SECONDS:
                await refreshed
        if time.monotonic() - self._fetched_at > _KEPT_SECONDS:
            raise self._unavailable()

    def _may_try(self) -> bool:
        return self._fetching is not None or time.monotonic() - self._tried_at > _AGAIN_SECONDS

    def _refresh(self) -> asyncio.Future[None]:
        """Fetch, once for all who wait for it."""
        if self._fetching is None:
            self._tried_at = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch())
        return asyncio.shield(self._fetching)

    async def _fetch(self) -> None:
        try:
            place = self.issuer.issuer.rstrip("/") + "/.well-known/openid-configuration"
            published = msgspec.convert(await fetch(place), _Published)
            if published.issuer != self.issuer.issuer:
                raise ValueError(f"what is published there is of {published.issuer[:100]!r}")
            listed = (await fetch(published.jwks_uri)).get("keys")
            if not isinstance(listed, list):
                raise ValueError("there is no list of keys")
            self._keys = _usable(listed)
            self._endpoints = Endpoints(published.authorization_endpoint, published.token_endpoint)
            self._fetched_at = time.monotonic()
        except (TimeoutError, OSError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            log.warning("an issuer cannot be asked", issuer=self.issuer.issuer, error=why)
        finally:
            self._fetching = None

    def _unavailable(self) -> Unavailable:
        text = f"the issuer {self.issuer.issuer} does not answer, so that its tokens cannot be checked"
        return Unavailable(text, code="issuer_unavailable", headers={"retry-after": str(int(_AGAIN_SECONDS))})


class Bearer(NamedTuple):
    """Who came with a token, by what it says and by rules of its issuer that it fits; or with a session that `began`
    by one."""

    issuer: Issuer
    subject: str
    fitting: list[str]
    until: float
    began: float | None = None

    @property
    def id(self) -> str:
        """The same for the same person, whatever token it brings."""
        return str(uuid.uuid5(_PEOPLE, f"{self.issuer.issuer}\n{self.subject}"))

    @property
    def name(self) -> str:
        """For the audit."""
        return f"{self.issuer.issuer}#{self.subject}"


class IssuerBook:
    """The issuers of this server's settings, of which there may be none."""

    def __init__(self, setting: str) -> None:
        self._known = {issuer.issuer: Trusted(issuer) for issuer in oidc.parse(_text(setting))} if setting else {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, issuer: str) -> Trusted | None:
        """One of them, by its URL."""
        return self._known.get(issuer)

    def for_login(self, name: str) -> Trusted | None:
        """The one of this name that people log in through; without a name, the first."""
        doors = [trusted for trusted in self._known.values() if trusted.issuer.client_id]
        return next((trusted for trusted in doors if not name or trusted.issuer.name == name), None)

    async def bearer(self, text: str, now: float) -> Bearer | None:
        """Who calls with this token; None if it is not to be believed."""
        try:
            token = oidc.read(text)
            claimed = token.claims.get("iss")
            trusted = self._known.get(claimed) if isinstance(claimed, str) else None
            if trusted is None:
                raise Refused("its issuer is not known")
            oidc.check_access(trusted.issuer, token, now)
            await trusted.verify(token)
        except Refused as why:
            log.info("a token was refused", why=str(why))
            return None
        return _bearer(trusted.issuer, token)

    async def identity(self, trusted: Trusted, text: str, nonce: str, now: float) -> Bearer | None:
        """Who logged in, as the issuer told us itself; None if that is not to be believed."""
        try:
            token = oidc.read(text)
            oidc.check_identity(trusted.issuer, token, now, nonce)
            await trusted.verify(token)
        except Refused as why:
            log.info("an identity token was refused", why=str(why), issuer=trusted.issuer.issuer)
            return None
        return _bearer(trusted.issuer, token)


def _bearer(issuer: Issuer, token: Token) -> Bearer:
    return Bearer(issuer, token.claims["sub"], issuer.fitting(token.claims), token.claims["exp"])


async def fetch(url: str, form: Mapping[str, str] | None = None, secret: str = "") -> dict[str, Any]:
    """What is at a URL, or is answered to a form there, as a JSON object; `secret`: of the form's client."""
    import aiohttp

    method, headers = "GET" if form is None else "POST", {"accept": "application/json"}
    if form is not None and secret:
        who = f"{quote(form['client_id'], safe='')}:{quote(secret, safe='')}"  # so encoded: RFC 6749, 2.3.1
        headers["authorization"] = f"Basic {base64.b64encode(who.encode()).decode()}"
    limit = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=headers) as session,
            session.request(method, _safe(url), data=form, allow_redirects=False) as reply,
        ):
            body = await _bounded(reply.content)
    except aiohttp.ClientError as error:
        raise OSError(f"{type(error).__name__}: {error}") from None
    if reply.status != 200:
        raise OSError(f"{url} answers {reply.status}")
    found = msgspec.json.decode(body)
    if not isinstance(found, dict):
        raise ValueError(f"{url} answers no JSON object")
    return found


async def _bounded(content: Any) -> bytes:
    body = b""
    async for part in content.iter_chunked(65_536):
        body += part
        if len(body) > _MOST_BYTES:
            raise ValueError(f"the answer has more than {_MOST_BYTES} bytes")
    return body


def _safe(url: str) -> str:
    if not oidc.is_safe_url(url):
        raise ValueError(f"{url[:200]!r} is not to be asked: it has no https://")
    return url


def _usable(listed: list[Any]) -> list[tuple[Mapping[str, Any], Key]]:
    """Those of an issuer's keys that can sign as we would believe it: never a shared secret, nothing too short."""
    from joserfc.errors import JoseError
    from joserfc.jwk import JWKRegistry

    found: list[tuple[Mapping[str, Any], Key]] = []
    for told in listed[:_MOST_KEYS]:
        if isinstance(told, dict) and told.get("kty") in ("RSA", "EC", "OKP") and told.get("use", "sig") == "sig":
            if told["kty"] == "RSA" and len(str(told.get("n", ""))) < _LEAST_MODULUS:
                continue
            with contextlib.suppress(JoseError, ValueError, TypeError, KeyError):
                found.append((told, JWKRegistry.import_key(told)))
    return found


def _text(setting: str) -> str:
    if setting.lstrip().startswith("{"):
        return setting
    try:
        return Path(setting).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"the issuers in TOCSIN_OIDC ({setting}) cannot be read: {error}") from None


def _secret(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"the client secret in {path} cannot be read: {error}") from None
