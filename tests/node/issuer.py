"""A small issuer of OpenID Connect: real HTTP on this machine, keys of its own, and what an attacker would turn."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
import warnings
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from tocsin.node.server.protocol import HttpServer, Reply, Request

KEYS: dict[str, Key] = {
    "rsa": RSAKey.generate_key(2048, {"kid": "rsa", "use": "sig"}),
    "ec": ECKey.generate_key("P-256", {"kid": "ec", "use": "sig"}),
    "ed": OKPKey.generate_key("Ed25519", {"kid": "ed", "use": "sig"}),
    "later": RSAKey.generate_key(2048, {"kid": "later", "use": "sig"}),
    "oct": OctKey.generate_key(256, {"kid": "oct", "use": "sig"}),
}
with warnings.catch_warnings(action="ignore"):
    KEYS["short"] = RSAKey.generate_key(1024, {"kid": "short", "use": "sig"})
SECRET = "an issuer's client secret"


def b64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


class TestIssuer:
    """One issuer; `published` are the names of its keys."""

    __test__ = False

    def __init__(self) -> None:
        self.url = ""
        self.published = ["rsa", "ec", "ed", "oct", "short"]
        self.asked: list[str] = []
        self.down = False
        self.lie: dict[str, Any] = {}  # what discovery says instead
        self.reply: Reply | None = None  # what every question is answered with instead
        self.hold: asyncio.Event | None = None  # no question is answered before this
        self.codes: dict[str, dict[str, str]] = {}  # a code, and what was asked for it
        self.id_token: dict[str, Any] = {}  # claims of the next one, instead of the right ones
        self._http = HttpServer(self._respond)

    async def start(self) -> None:
        self.url = f"http://127.0.0.1:{await self._http.start('127.0.0.1', 0)}"

    async def stop(self) -> None:
        await self._http.stop(grace=1.0)

    # ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────

    def claims(self, **other: Any) -> dict[str, Any]:
        """Of a good access token; None takes one away."""
        now = int(time.time())
        good = {"iss": self.url, "aud": "tocsin", "sub": "alice", "iat": now, "exp": now + 600, "groups": ["ops"]}
        return {name: value for name, value in (good | other).items() if value is not None}

    def token(
        self, key: str = "rsa", algorithm: str = "RS256", header: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Signed with one of the keys; `header`: what it says beside the algorithm and the key's name."""
        head = {"alg": algorithm, "typ": "at+jwt", "kid": key} | (header or {})
        return sign(head, self.claims(**claims), KEYS[key], algorithm)

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _respond(self, request: Request) -> Reply:
        self.asked.append(request.path)
        if self.hold is not None:
            await self.hold.wait()
        if self.down:
            return Reply(b"{}", 500)
        if self.reply is not None:
            return self.reply
        match request.path:
            case "/.well-known/openid-configuration":
                told = {"issuer": self.url, "jwks_uri": f"{self.url}/keys", "token_endpoint": f"{self.url}/token"}
                return _json(told | {"authorization_endpoint": f"{self.url}/authorize"} | self.lie)
            case "/keys":
                return _json({"keys": [KEYS[name].as_dict(private=False) for name in self.published]})
            case "/token":
                return self._exchange(dict(parse_qsl((await request.body(10_000)).decode())), request)
        return Reply(b"{}", 404)

    def authorize(self, location: str) -> str:
        """What the browser of somebody who agrees does with `location`: the URL that it is sent back to."""
        asked = dict(parse_qsl(urlsplit(location).query))
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state'], 'iss': self.url})}"

    def _exchange(self, form: dict[str, str], request: Request) -> Reply:
        asked = self.codes.pop(form.get("code", ""), None)
        who = base64.b64encode(f"console:{SECRET.replace(' ', '%20').replace(chr(39), '%27')}".encode()).decode()
        if asked is None or request.headers.get("authorization") != f"Basic {who}":
            return _json({"error": "invalid_grant"}, 400)
        challenge = b64(hashlib.sha256(form["code_verifier"].encode()).digest())
        if asked["code_challenge"] != challenge or asked["redirect_uri"] != form["redirect_uri"]:
            return _json({"error": "invalid_grant"}, 400)
        claims = {"aud": "console", "nonce": asked["nonce"]} | self.id_token
        return _json({"id_token": self.token(header={"typ": "JWT"}, **claims), "access_token": "unused"})


def sign(header: dict[str, Any], claims: Any, key: Key, algorithm: str) -> str:
    return seal(json.dumps(header), claims if isinstance(claims, str) else json.dumps(claims), key, algorithm)


def seal(header: str, claims: str, key: Key, algorithm: str) -> str:
    """Texts as they are, signed."""
    signed = f"{b64(header.encode())}.{b64(claims.encode())}"
    return f"{signed}.{b64(JWSRegistry.algorithms[algorithm].sign(signed.encode(), key))}"


def _json(value: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(value).encode(), status)
