"""Tokens of other parties (OpenID Connect): which are believed, and what their bearers may do here.

Pure rules. A token is believed for what the operator's configuration says of its issuer and for nothing that the token
says of itself: the keys are the issuer's published ones, the algorithms are listed, `jku`, `jwk`, `x5u` and `x5c` are
not looked at. Signatures are checked by whoever has the keys.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tocsin.errors import ApiProblem, SetupError
from tocsin.model.access import PATTERN, Scope, misplaced_scopes
from tocsin.model.strict import refuse_odd

Algorithm = Literal["RS256", "PS256", "ES256", "EdDSA"]
MOST_TOKEN = 8192  # characters
LEEWAY = 30.0  # seconds that clocks may differ
_MOST_LIFE = 86_400.0  # of a token: one that is good for longer is a key, and should be one of ours
_MOST_SUBJECT = 255
_TYPES = ("jwt", "at+jwt", "application/at+jwt")
# What only a token has that tells a client who logged in: not meant for an API, and often seen by more eyes.
_OF_ID_TOKENS = ("nonce", "at_hash", "c_hash", "s_hash")
_NOT_FOR_ACCESS = ("id", "refresh", "offline", "logout")  # `typ` among the claims, as Keycloak has it
# What only a token has that is for calling an API: its type, as RFC 9068 has it, or Keycloak's among the claims.
_ACCESS_TYPES, _ACCESS_CLAIM = ("at+jwt", "application/at+jwt"), "bearer"
_SEGMENT = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


class Refused(Exception):
    """Why a token is not believed: for our log. Its bearer is told nothing that would help to make a better one."""


# ── the configuration ────────────────────────────────────────────────────────────────────────────────────────────


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whoever's claim is, or contains, a value may do what a role may, in a tenant, with some jobs of it or all."""

    claim: str
    tenant: str
    role: Literal["viewer", "operator", "editor", "admin", "platform"]
    equals: str | None = None
    contains: str | None = None
    jobs: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it asks for."""
        return f"{self.claim} is {self.equals}" if self.equals is not None else f"{self.claim} has {self.contains}"

    @property
    def scope(self) -> Scope | None:
        """The jobs that it is kept to; None: all."""
        if not self.jobs and not self.tags:
            return None
        return Scope(self.jobs, tuple((key, value) for key, _, value in (tag.partition(":") for tag in self.tags)))

    def fits(self, claims: Mapping[str, Any]) -> bool:
        """Whether a token's claims are what it asks for."""
        value = _claim(claims, self.claim)
        if self.equals is not None:
            return isinstance(value, str) and value == self.equals
        if isinstance(value, str):  # as `scope` is written
            return self.contains in value.split(" ")
        return isinstance(value, list) and self.contains in [each for each in value if isinstance(each, str)]

    def problem(self) -> str | None:
        """What is wrong with it, if anything is."""
        if (self.equals is None) == (self.contains is None):
            return "needs one of `equals` and `contains`"
        if not self.claim or not _SLUG.fullmatch(self.tenant):
            return "needs a claim and a tenant"
        if any(not re.search(PATTERN, name) for name in self.jobs) or any(":" not in tag for tag in self.tags):
            return "`jobs` are patterns of names, `tags` are written key:value"
        return misplaced_scopes(self.role, bool(self.jobs or self.tags), False)


class Issuer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A party whose tokens are believed. `audience`: for whom they must be made; `clients`: to whom they must have been
    given (any, if there are none); `client_id` and the rest: how people log in through it with a browser."""

    issuer: str
    audience: str | tuple[str, ...]
    rules: tuple[Rule, ...]
    name: str = ""
    algorithms: tuple[Algorithm, ...] = ("RS256",)
    clients: tuple[str, ...] = ()
    client_id: str = ""
    client_secret_file: str = ""
    scopes: tuple[str, ...] = ("openid", "profile")
    session_seconds: int = 28_800

    @property
    def audiences(self) -> Sequence[str]:
        """For whom its tokens must be made, any of them."""
        return (self.audience,) if isinstance(self.audience, str) else self.audience

    def fitting(self, claims: Mapping[str, Any]) -> list[str]:
        """The names of the rules that claims fit."""
        return [rule.name for rule in self.rules if rule.fits(claims)]

    def granted(self, fitting: Collection[str]) -> Rule | None:
        """The first rule among those of these names."""
        return next((rule for rule in self.rules if rule.name in fitting), None)

    def problems(self) -> Iterator[str]:
        """What is wrong with it."""
        if not is_safe_url(self.issuer) or "?" in self.issuer or self.issuer.endswith("/openid-configuration"):
            yield "its URL begins with https:// (http:// on this machine only), and has no query"
        if not self.audiences or not all(self.audiences):
            yield "needs an `audience`"
        if not self.algorithms:
            yield "needs `algorithms`"
        if not 60 <= self.session_seconds <= 604_800:
            yield "`session_seconds` is between a minute and a week"
        if not self.rules:
            yield "needs rules, for without one nobody may do anything"
        for number, rule in enumerate(self.rules, 1):
            if (problem := rule.problem()) is not None:
                yield f"rule {number} {problem}"


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    issuers: tuple[Issuer, ...]


def parse(text: str) -> tuple[Issuer, ...]:
    """The issuers of a document in JSON or TOML. Raises what is wrong with it."""
    try:
        raw = msgspec.json.decode(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        found = msgspec.convert(raw, _Document).issuers
    except ValueError as error:
        raise SetupError(f"TOCSIN_OIDC cannot be read: {error}") from None
    for issuer in found:
        for problem in issuer.problems():
            raise SetupError(f"TOCSIN_OIDC: issuer {issuer.issuer!r}: {problem}")
    if len({issuer.issuer for issuer in found}) < len(found):
        raise SetupError("TOCSIN_OIDC: an issuer stands there twice")
    return found


def is_safe_url(url: str) -> bool:
    """Whether what comes from there cannot have been changed on its way."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.fragment or parts.username is not None or not host or not url.isascii() or not url.isprintable():
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# ── a token ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Token(NamedTuple):
    """A token that was read, and is not yet believed."""

    algorithm: str
    key_id: str | None
    claims: Mapping[str, Any]
    signed: bytes
    signature: bytes
    type: str | None = None


def looks_like_token(text: str) -> bool:
    """Whether it has three parts, which no key of ours has."""
    return text.count(".") == 2


def read(text: str) -> Token:
    """Take a token apart, strictly: one way to write it, no name twice, nothing that changes how it is to be read."""
    if len(text) > MOST_TOKEN:
        raise Refused("it is too long")
    parts = text.split(".")
    if len(parts) != 3:
        raise Refused("it has not three parts")
    header, claims = (_object(part) for part in parts[:2])
    algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ")
    if not isinstance(algorithm, str):
        raise Refused("it names no algorithm")
    if "crit" in header or "b64" in header or "zip" in header or "enc" in header:
        raise Refused("it is to be read in another way")
    if key_id is not None and not (isinstance(key_id, str) and 0 < len(key_id) <= 256):
        raise Refused("its `kid` is none")
    if kind is not None and not isinstance(kind, str):
        raise Refused("its `typ` is none")
    signed = f"{parts[0]}.{parts[1]}".encode("ascii")
    return Token(algorithm, key_id, claims, signed, _bytes(parts[2]), kind)


def check_access(issuer: Issuer, token: Token, now: float) -> None:
    """Refuse a token that is not made for calling us, now."""
    if token.type is not None and token.type.lower() not in _TYPES:
        raise Refused(f"its type is {token.type[:40]!r}")
    claims = token.claims
    kind = claims.get("typ")
    if any(name in claims for name in _OF_ID_TOKENS) or (isinstance(kind, str) and kind.lower() in _NOT_FOR_ACCESS):
        raise Refused("it is no access token")
    _check_common(issuer, claims, now, issuer.audiences)
    _refuse_identity(issuer, token)
    given_to = claims.get("azp", claims.get("client_id"))
    if issuer.clients and given_to not in issuer.clients:
        raise Refused("it was given to a client that is not among `clients`")


def _refuse_identity(issuer: Issuer, token: Token) -> None:
    """Refuse what may tell a client who logged in: such a token is made for the client, and need not have a nonce. One
    that is made for a client of ours must say that it is for access."""
    audience, kind = token.claims["aud"], token.claims.get("typ")
    made_for = [audience] if isinstance(audience, str) else audience
    of_client = any(isinstance(each, str) and each in (issuer.client_id, *issuer.clients) for each in made_for)
    says_access = (token.type or "").lower() in _ACCESS_TYPES or (
        isinstance(kind, str) and kind.lower() == _ACCESS_CLAIM
    )
    if of_client and not says_access:
        raise Refused("it is made for a client and does not say that it is no identity token")


def check_identity(issuer: Issuer, token: Token, now: float, nonce: str) -> None:
    """Refuse a token that does not tell who has just logged in with us."""
    claims = token.claims
    if token.type is not None and token.type.lower() != "jwt":
        raise Refused(f"its type is {token.type[:40]!r}")
    _check_common(issuer, claims, now, [issuer.client_id])
    several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    if ("azp" in claims or several) and claims.get("azp") != issuer.client_id:
        raise Refused("it was given to another client")
    if claims.get("nonce") != nonce:
        raise Refused("it is not the answer to this login")


def _check_common(issuer: Issuer, claims: Mapping[str, Any], now: float, audiences: Collection[str]) -> None:
    if claims.get("iss") != issuer.issuer:
        raise Refused("it is another issuer's")
    audience = claims.get("aud")
    made_for = [audience] if isinstance(audience, str) else audience if isinstance(audience, list) else []
    if not any(isinstance(each, str) and each in audiences for each in made_for):
        raise Refused("it is made for somebody else")
    expires, begins, issued = (_instant(claims, name) for name in ("exp", "nbf", "iat"))
    if expires is None or not now - LEEWAY < expires <= now + _MOST_LIFE + LEEWAY:
        raise Refused("it has ended, or is good for longer than a day")
    if (begins is not None and begins > now + LEEWAY) or (issued is not None and issued > now + LEEWAY):
        raise Refused("it is not good yet")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= _MOST_SUBJECT or not subject.isprintable():
        raise Refused("it names nobody")


def _instant(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if name in claims and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise Refused(f"its `{name}` is no instant")
    return value


def _object(segment: str) -> dict[str, Any]:
    body = _bytes(segment)
    try:
        found = msgspec.json.decode(body)
        refuse_odd(body)
    except (msgspec.MsgspecError, ApiProblem, ValueError, RecursionError):
        raise Refused("a part of it is no JSON, or a name stands there twice") from None
    if not isinstance(found, dict):
        raise Refused("a part of it is no JSON object")
    return found


def _bytes(segment: str) -> bytes:
    """Base64url as RFC 7515 has it: no padding, no other letters, and no second way to write the same."""
    if not _SEGMENT.fullmatch(segment):
        raise Refused("a part of it is not base64url")
    try:
        found = base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4))
    except (ValueError, binascii.Error):
        raise Refused("a part of it is not base64url") from None
    if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != segment:
        raise Refused("a part of it is not base64url")
    return found


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """A claim by its name, or along a path such as `realm_access.roles`."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for step in name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value
