"""access: what keys and row-level security take of the submit and status figures, what a refusal costs, and how soon a
key that is revoked is refused everywhere.

With and without walls in one run and by turns, on two servers of one database: one of them is `bench.bare`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import http.server
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from joserfc.jwk import RSAKey
from joserfc.jws import JWSRegistry

from bench import bare
from bench.cpu import tree
from bench.stand import Api, Stand
from bench.submit import JOB, Rate, answer, request, round_of, usual_cpu, usual_rate
from tocsin.flow.keys import new_key

BAR = 0.15
REFUSAL_MS, REVOKED_SECONDS = 50.0, 1.0
_REFUSALS = 300
_REVOCATIONS = 10
_LARGE_TOKEN = 8192  # characters: no longer one is looked at
_NOWHERE = "019a0000-0000-7000-8000-000000000000"
# The edge would refuse the load itself before it came to what is measured.
_UNLIMITED = {"rate_per_key": 0.0, "rate_per_address": 0.0, "auth_failures_per_address": 0.0}


@dataclass(frozen=True)
class Walls:
    """One kind of call with and without walls."""

    what: str
    walled: list[Rate]
    bare: list[Rate]

    @property
    def share(self) -> float:
        """Of the rate that the walls take."""
        return 1 - usual_rate(self.walled) / usual_rate(self.bare)

    @property
    def cpu_share(self) -> float:
        """Of the processors' time that they take: it shows on a machine that others use meanwhile, too."""
        return 1 - usual_cpu(self.bare) / usual_cpu(self.walled)


@dataclass(frozen=True)
class Refusal:
    """Milliseconds of processors' time, of servers and PostgreSQL together, that a refusal takes; all that they do
    meanwhile counted in."""

    what: str
    status: int
    p50: float
    p99: float


@dataclass(frozen=True)
class Access:
    """What was found. `revoked`: seconds from the revocation's answer to the last answer that any server gave."""

    walls: list[Walls]
    refusals: list[Refusal]
    revoked: list[float]

    def document(self) -> dict[str, Any]:
        """For the results' file."""
        shares = {walls.what: {"share": walls.share, "cpu_share": walls.cpu_share} for walls in self.walls}
        return asdict(self) | {"shares": shares, "bar": BAR}


def measure(stand: Stand, repeat: int) -> Access:
    """Walls, refusals, revocations."""
    asyncio.run(stand.execute(bare.SET_UP))
    with Issuer() as issuer:
        walled = stand.add_server(**_UNLIMITED, oidc=issuer.setting)
        naked = stand.add_server(module="bench.bare", **_UNLIMITED)
        found = _walls(stand, walled, naked, repeat)
        refusals = [_refused(stand, walled, *one) for one in (*_reasons(stand), *issuer.refused())]
        return Access(found, refusals, _revocations(stand, walled))


def _walls(stand: Stand, walled: Api, naked: Api, repeat: int) -> list[Walls]:
    job = stand.api.post("/v1/jobs", JOB)["id"]
    run = stand.api.post(f"/v1/jobs/{job}/runs", {})["id"]
    key = stand.keys["key"]
    calls = {
        "status by id": request("GET", f"/v1/runs/{run}", key),
        "submit": request("POST", "/v1/jobs", key, JOB),
    }
    found = [Walls(what, [], []) for what in calls]
    for turn in range(repeat):
        for walls, asking in zip(found, calls.values(), strict=True):
            sides = [("with walls", walled, walls.walled), ("without", naked, walls.bare)]
            # By turns, and each first every other time: what slows the machine down slows down both.
            for how, server, rates in sides if turn % 2 == 0 else reversed(sides):
                rates.append(round_of(stand, f"{walls.what}, {how}", asking, port=server.port))
    return found


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _reasons(stand: Stand) -> Iterator[tuple[str, int, str, str]]:
    """What is refused, by which status, with which key, and where."""
    api = stand.api
    api.post("/v1/tenants", {"slug": "access"})
    foreign = api.create_job({"kind": "process", "command": ["true"]}, "access")
    made = {role: api.post("/v1/keys", {"role": role}) for role in ("viewer", "operator", "editor", "worker")}
    scoped = api.post("/v1/keys", {"role": "viewer", "scopes": {"jobs": ["billing-*"]}})["key"]
    asyncio.run(stand.execute(f"update api_keys set revoked_at = now() where id = '{made['operator']['id']}'"))
    asyncio.run(stand.execute(f"update api_keys set expires_at = now() where id = '{made['editor']['id']}'"))
    viewer, good = made["viewer"]["key"], stand.keys["key"]
    yield "a key that is not one", 401, good[:-1] + ("0" if good[-1] != "0" else "1"), "/v1/jobs"
    yield "a key that nobody has", 401, new_key(), "/v1/jobs"
    yield "a revoked key", 401, made["operator"]["key"], "/v1/jobs"
    yield "an expired key", 401, made["editor"]["key"], "/v1/jobs"
    yield "a forged run token", 401, "tcr_1.1." + "0" * 48, "/v1/jobs"
    yield "another role", 403, made["worker"]["key"], "/v1/jobs"
    yield "a foreign id", 404, viewer, f"/v1/jobs/{foreign}"
    yield "an id that nobody has", 404, viewer, f"/v1/jobs/{_NOWHERE}"
    yield "beyond a key's scope", 403, scoped, "/v1/pools"
    yield "a job beyond it", 404, scoped, f"/v1/jobs/{foreign}"


class Issuer:
    """An issuer of OpenID Connect on this machine, and tokens of it that are not to be believed."""

    def __init__(self) -> None:
        self._key = RSAKey.generate_key(2048, {"kid": "bench", "use": "sig"})
        keys = {"keys": [self._key.as_dict(private=False)]}
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Published)
        self._url = f"http://127.0.0.1:{self._server.server_port}"
        discovery = {"issuer": self._url, "jwks_uri": f"{self._url}/keys"}
        _Published.documents = {"/.well-known/openid-configuration": discovery, "/keys": keys}

    def __enter__(self) -> Issuer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def setting(self) -> str:
        """What a server is told of it."""
        rule = {"claim": "sub", "equals": "bench", "tenant": "default", "role": "viewer"}
        return json.dumps({"issuers": [{"issuer": self._url, "audience": "tocsin", "rules": [rule]}]})

    def token(self, kid: str = "bench", **claims: Any) -> str:
        """Signed, and good unless it is told otherwise."""
        now = int(time.time())
        whole = {"iss": self._url, "aud": "tocsin", "sub": "bench", "iat": now, "exp": now + 3600} | claims
        parts = ({"alg": "RS256", "typ": "at+jwt", "kid": kid}, whole)
        signed = ".".join(_b64(json.dumps(part).encode()) for part in parts)
        return f"{signed}.{_b64(JWSRegistry.algorithms['RS256'].sign(signed.encode(), self._key))}"

    def refused(self) -> Iterator[tuple[str, int, str, str]]:
        """As `_reasons` has them."""
        path = "/v1/jobs"
        yield "a token with a wrong signature", 401, _altered(self.token()), path
        yield "a token of an unknown key", 401, self.token(kid="unknown"), path
        large = self.token(x="a" * (3 * (_LARGE_TOKEN - len(self.token())) // 4 - 16))
        yield f"a token of {len(large):,} characters with a wrong signature", 401, _altered(large), path
        yield "a token that has ended", 401, self.token(exp=int(time.time()) - 3600), path


class _Published(http.server.BaseHTTPRequestHandler):
    documents: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        body = json.dumps(self.documents[self.path]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        """Nobody reads it."""


def _altered(token: str) -> str:
    """With another letter in the midst of its signature."""
    place = len(token) - 100
    return token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]


def _b64(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _refused(stand: Stand, server: Api, what: str, status: int, key: str, path: str) -> Refusal:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    took = []
    pids = [*tree(stand.postgres.pid or 0), *(server.pid for server in stand.more_servers)]
    for _ in range(_REFUSALS):
        before = _nanoseconds(pids)
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"})
        reply = connection.getresponse()
        reply.read()
        took.append((_nanoseconds(pids) - before) / 1e6)
        if reply.status != status:
            raise RuntimeError(f"{what}: {reply.status}")
    connection.close()
    took.sort()
    return Refusal(what, status, took[len(took) // 2], took[len(took) * 99 // 100])


def _nanoseconds(pids: list[int]) -> int:
    """On a processor so far, over all threads."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                total += int((thread / "schedstat").read_text().partition(" ")[0])
    return total


# ── revocations ──────────────────────────────────────────────────────────────────────────────────────────────────


def _revocations(stand: Stand, other: Api) -> list[float]:
    return [asyncio.run(_revoked(stand, (stand.settings.port, other.port))) for _ in range(_REVOCATIONS)]


async def _revoked(stand: Stand, ports: tuple[int, ...]) -> float:
    api = stand.api
    made = api.post("/v1/keys", {"role": "viewer"})
    begun = [asyncio.Event() for _ in ports]
    callers = [
        asyncio.create_task(_last_answer(port, made["key"], event)) for port, event in zip(ports, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    await asyncio.to_thread(api.call, "DELETE", f"/v1/keys/{made['id']}")
    answered = time.monotonic()
    return max(0.0, max(await asyncio.gather(*callers)) - answered)


async def _last_answer(port: int, key: str, begun: asyncio.Event) -> float:
    """When the last call that was not refused had been sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asking, last = request("GET", "/v1/jobs?limit=1", key), 0.0
    while True:
        sent = time.monotonic()
        writer.write(asking)
        if await answer(reader) == 401:
            writer.close()
            return last
        last = sent
        begun.set()
