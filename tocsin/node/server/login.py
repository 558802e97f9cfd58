"""Browser login through an issuer: the authorization code flow with PKCE, and the session that comes of it.

Both what is remembered during a login and the session are cookies that only this cluster can read or write (AES-GCM,
under a key derived from the master key), bound to this host, out of reach of scripts. Nothing of them is stored here: a
session ends with its lifetime, in the browser that logs out, or with all others of that person, of whom the instant is
kept. That, and the rules, are looked at anew with each call.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

import msgspec

from tocsin.errors import ApiProblem, BadRequest, Forbidden, NotFound, SetupError, Unauthorized, Unavailable
from tocsin.flow import keys
from tocsin.node.server.authenticator import person
from tocsin.node.server.http import request_id
from tocsin.node.server.issuers import Bearer, Trusted, fetch
from tocsin.node.server.protocol import Reply, Request
from tocsin.store.vault import context_of, seal, unseal
from tocsin.telemetry import get_logger

if TYPE_CHECKING:
    from tocsin.node.assemble import Node

log = get_logger("oidc")
T = TypeVar("T")
SESSION, _LOGIN = "__Host-tocsin", "__Host-tocsin-login"
_LOGIN_SECONDS = 600
_COOKIE = "Path=/; Secure; HttpOnly; SameSite=Lax"
_SAFE = frozenset(("GET", "HEAD"))
_NEXT = re.compile(
    r"/(?![/\\])[!-\[\]-~]{0,1000}", re.ASCII
)  # a path here; never `//host`, nor what a browser takes for it
_WORD = re.compile(r"[a-z_]{1,64}", re.ASCII)


class _Begun(msgspec.Struct):
    """A login under way."""

    issuer: str
    state: str
    nonce: str
    verifier: str
    next: str
    until: float


class _Session(msgspec.Struct):
    """Who logged in, and which rules that fitted."""

    issuer: str
    subject: str
    fitting: list[str]
    until: float
    id: str  # of this login: no two sessions are the same, whoever they are of
    began: float = 0.0


class Logins:
    """Logins and sessions of one server."""

    def __init__(self, node: Node) -> None:
        """Raises if people could log in and there is no master key: what the database holds must never open a session,
        for whoever had a dump of it would be anybody."""
        self._node = node
        self._keys = node.master_keys.derive_all("sessions")  # the first seals, all unseal; without one, none does
        if not self._keys and (door := node.issuers.for_login("")) is not None:
            raise SetupError(
                f"TOCSIN_OIDC: issuer {door.issuer.issuer!r} has a client_id, so people log in with a browser, and "
                "their sessions are sealed with a master key: set TOCSIN_MASTER_KEY to the same on every server "
                "(docs/how-to/secrets.md), or take the client_id out"
            )
        settings = node.settings
        scheme = "https" if settings.tls_cert else "http"
        self._origin = settings.public_url or f"{scheme}://localhost:{settings.port}"
        # Behind a proxy with TLS a page that came without it, which others could have written, is not ours.
        self._scheme = None if settings.public_url else scheme

    # ── /login, /login/callback, /logout, /logout/everywhere ─────────────────────────────────────────────────────

    async def begin(self, request: Request) -> Reply:
        """Send the browser to the issuer."""
        query = dict(request.query)
        trusted = self._node.issuers.for_login(query.get("issuer", ""))
        if trusted is None:
            raise NotFound("nobody logs in here with a browser: TOCSIN_OIDC names no issuer with a client_id for it")
        place = query.get("next", "/")
        if not _NEXT.fullmatch(place):
            raise BadRequest("`next` is a path of this server", code="bad_redirect")
        where = (await trusted.endpoints()).authorization_endpoint
        begun = _Begun(trusted.issuer.issuer, _random(), _random(), _random(), place, self._now() + _LOGIN_SECONDS)
        asked = {
            "response_type": "code",
            "client_id": trusted.issuer.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(trusted.issuer.scopes),
            "state": begun.state,
            "nonce": begun.nonce,
            "code_challenge": _b64(hashlib.sha256(begun.verifier.encode()).digest()),
            "code_challenge_method": "S256",
        }
        url = f"{where}{'&' if '?' in where else '?'}{urlencode(asked)}"
        return Reply(status=302, headers={"location": url}, cookies=[self._cookie(_LOGIN, begun, _LOGIN_SECONDS)])

    async def finish(self, request: Request) -> Reply:
        """The issuer sends the browser back, with a code for the one who began this login here."""
        query = dict(request.query)
        begun = self._read(request, _LOGIN, _Begun)
        if (
            begun is None
            or begun.until < self._now()
            or not hmac.compare_digest(begun.state.encode(), query.get("state", "").encode())
        ):
            raise BadRequest("this is not the answer to a login that began here; begin again", code="login_state")
        trusted = self._node.issuers.get(begun.issuer)
        if trusted is None or query.get("iss", begun.issuer) != begun.issuer:
            raise BadRequest("this is the answer of another issuer; begin again", code="login_state")
        if "code" not in query:
            why = query.get("error", "")
            told = why if _WORD.fullmatch(why) else "no reason"
            raise Forbidden(f"the issuer did not let you in: {told}", code="login_refused")
        self._node.edge.hold_back(request)
        try:
            bearer = await self._exchange(trusted, begun, query["code"])
        except ApiProblem:
            self._node.edge.failed(request)
            raise
        who = await person(self._node.db, bearer)
        caller = who._replace(address=self._node.edge.address(request), request_id=request_id(request))
        await keys.note_login(self._node.db, caller, begun.issuer)
        life = trusted.issuer.session_seconds
        now = self._now()
        session = _Session(begun.issuer, bearer.subject, bearer.fitting, now + life, _random(), now)
        return Reply(
            status=303,
            headers={"location": begun.next},
            cookies=[self._cookie(SESSION, session, life), _gone(_LOGIN)],
        )

    async def end(self, request: Request) -> Reply:
        """Forget the session, in this browser."""
        self._refuse_cross_site(request)
        return self._ended()

    async def end_all(self, request: Request) -> Reply:
        """End all sessions of the person who calls, on every server."""
        who = await self._node.authenticator.identify(request)
        self._node.edge.count(who.key_id)
        if not who.subject:
            raise Forbidden("this is for people with a session; `tocsin key revoke` ends a key", code="no_session")
        caller = who._replace(address=self._node.edge.address(request), request_id=request_id(request))
        await keys.log_out(self._node.db, caller)
        self._node.end_keys([who.key_id])
        return self._ended()

    @staticmethod
    def _ended() -> Reply:
        return Reply(status=303, headers={"location": "/"}, cookies=[_gone(SESSION), _gone(_LOGIN)])

    async def _exchange(self, trusted: Trusted, begun: _Begun, code: str) -> Bearer:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "client_id": trusted.issuer.client_id,
            "code_verifier": begun.verifier,
        }
        where = (await trusted.endpoints()).token_endpoint
        try:
            told = (await fetch(where, form, trusted.client_secret)).get("id_token")
        except (TimeoutError, OSError, ValueError) as error:
            log.warning("a login failed", issuer=trusted.issuer.issuer, error=f"{type(error).__name__}: {error}")
            raise Unavailable("the issuer did not take its own code; begin again", code="login_failed") from None
        bearer = None
        if isinstance(told, str):
            bearer = await self._node.issuers.identity(trusted, told, begun.nonce, self._now())
        if bearer is None:
            raise Unauthorized("what the issuer told of you cannot be believed; begin again", code="login_failed")
        return bearer

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def bearer(self, request: Request) -> Bearer | None:
        """Whose session the request has, if it has one; raises if another site's page sends it."""
        session = self._read(request, SESSION, _Session) if self._node.issuers and "cookie" in request.headers else None
        if session is None or session.until < self._now():
            return None
        trusted = self._node.issuers.get(session.issuer)
        if trusted is None:
            return None
        if request.method not in _SAFE:
            self._refuse_cross_site(request)
        return Bearer(trusted.issuer, session.subject, session.fitting, session.until, session.began)

    def _refuse_cross_site(self, request: Request) -> None:
        """A browser sends its cookies along whoever makes it call: only our own pages may change something by them."""
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        ours = [None, _as_browsers_write(self._origin)]
        if self._scheme is not None:  # by whatever name the edge lets it be called
            ours.append(f"{self._scheme}://{request.headers.get('host', '')}")
        if (site is None and origin is None) or site not in (None, "same-origin") or origin not in ours:
            raise Forbidden("a page of another site may not do this with your session", code="cross_site")

    @property
    def _redirect_uri(self) -> str:
        return f"{self._origin}/login/callback"

    def _now(self) -> float:
        return self._node.db.clock.now().timestamp()

    def _cookie(self, name: str, value: msgspec.Struct, seconds: int) -> str:
        sealed = seal(self._keys[0], msgspec.json.encode(value), context_of("cookie", name))
        return f"{name}={_b64(sealed)}; {_COOKIE}; Max-Age={seconds}"

    def _read(self, request: Request, name: str, kind: type[T]) -> T | None:
        """What a cookie holds; None if there is none, or none that was made here for this."""
        given = [part.strip().partition("=") for part in request.headers.get("cookie", "").split(";")]
        values = [value for key, _, value in given if key == name]
        if len(values) != 1:
            return None
        try:
            sealed = base64.b64decode(values[0] + "=" * (-len(values[0]) % 4), altchars=b"-_", validate=True)
        except ValueError:
            return None
        for key in self._keys:
            try:
                return msgspec.json.decode(unseal(key, sealed, context_of("cookie", name)), type=kind)
            except (ApiProblem, msgspec.MsgspecError):
                continue
        return None


def _as_browsers_write(origin: str) -> str:
    """In small letters, and without the port that goes without saying."""
    origin = origin.lower()
    return origin.removesuffix(":443" if origin.startswith("https:") else ":80")


def _gone(name: str) -> str:
    return f"{name}=; {_COOKIE}; Max-Age=0"


def _random() -> str:
    return _b64(os.urandom(32))


def _b64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
