"""The edge: what every request passes before anybody asks what it is about.

Only known names of this server are answered, so that a page which has its own name resolve to our address (DNS
rebinding) gets nothing. Nobody's key stands in a URL. Other origins are let in by name or not at all. Requests are
counted by address, and by key once that is known; who guesses keys is held back sooner.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tocsin.errors import BadRequest, Forbidden, MisdirectedRequest
from tocsin.node.server.protocol import Reply
from tocsin.node.server.rates import Rate
from tocsin.settings import listed
from tocsin.telemetry import AUTH_FAILURES

if TYPE_CHECKING:
    from tocsin.node.server.protocol import Request
    from tocsin.settings import Settings

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_BURST, _GUESSES = 2.0, 10.0  # seconds' worth at once: of requests, of failures
# Of one key, a second: a fleet of two thousand may start at once, and nobody fills the list of workers.
_REGISTRATIONS, _FLEET = 20.0, 100.0
_MOST_HOSTS_KNOWN = 1000
_LONGEST_NAME = 253  # of a host, as DNS has it; an address is shorter
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([a-zA-Z0-9._-]+))(?::\d{1,5})?", re.ASCII)
_KEY_NAMES = frozenset(("key", "api_key", "apikey", "token", "access_token", "id_token", "authorization", "password"))
_PROBES = frozenset(("/healthz", "/readyz"))  # asked under whatever name or address a prober knows
_WORKERS = "/v1/worker/"
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
# A year. Not on loopback, where it would bind every other program that answers to `localhost`.
_HSTS = "max-age=31536000"
_ALLOWED = {
    "access-control-allow-methods": "GET, POST, PUT, PATCH, DELETE",
    "access-control-allow-headers": "authorization, content-type, idempotency-key, if-match, last-event-id, "
    "tocsin-tenant, x-request-id",
    "access-control-max-age": "600",
}
_EXPOSED = "etag, idempotent-replayed, ratelimit, ratelimit-policy, retry-after, x-request-id"


def common_headers(settings: Settings) -> dict[str, str]:
    """Of every answer that has none of its own by that name."""
    headers = {
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
        "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    }
    if settings.tls_cert and not settings.is_local:
        headers["strict-transport-security"] = _HSTS
    return headers


class Edge:
    """The edge of one server."""

    def __init__(self, settings: Settings) -> None:
        own = urlsplit(settings.public_url).hostname or "localhost"
        self._hosts = {*_LOCAL_NAMES, own, *listed(f"{settings.host},{settings.hosts}".lower())}
        self._hosts_seen: set[str] = set()
        self._proxies, self._watchers = _networks(settings.proxies), _networks(settings.metrics_from)
        self._origins = set(listed(settings.cors_origins.lower()))
        self._of_address = Rate("address", settings.rate_per_address, _BURST)
        self._of_key = Rate("key", settings.rate_per_key, _BURST)
        self._failures = Rate("failures", settings.auth_failures_per_address, _GUESSES)
        self._registrations = Rate("registrations", _REGISTRATIONS, _FLEET)

    def admit(self, request: Request) -> None:
        """Raises why a request goes no further."""
        path = request.path
        host = request.headers.get("host")
        if host is not None and host not in self._hosts_seen and path not in _PROBES:
            self._check_host(host)
        if request.query_string:
            refuse_key_in_url(request)
        if not path.startswith(_WORKERS):  # whether it is a worker's is not known yet: `settle`
            self._of_address.take(self._source(request), time.monotonic())

    def settle(self, request: Request) -> None:
        """Count what came where workers call and was none of theirs; raises if that was too often.

        Workers come in fleets from behind one address, and what they cost is bounded by what they claimed: they are not
        counted. Nor are they refused for what others do from there, so that who is no worker is counted afterwards.
        """
        if not request.of_worker and request.path.startswith(_WORKERS):
            self._of_address.take(self._source(request), time.monotonic())

    def _check_host(self, host: str) -> None:
        name = _host_name(host)
        if name not in self._hosts and not _is_address(name):
            raise MisdirectedRequest(
                "this server does not go by that name; if it should, add the name to TOCSIN_HOSTS", code="unknown_host"
            )
        if len(self._hosts_seen) < _MOST_HOSTS_KNOWN:
            self._hosts_seen.add(host)

    # ── who calls ────────────────────────────────────────────────────────────────────────────────────────────────

    def address(self, request: Request) -> str:
        """Where a call comes from: of what `X-Forwarded-For` tells, the last that no proxy of ours could vouch for."""
        peer = request.address
        if not self._proxies or not self.is_proxy(peer):
            return peer
        for told in reversed(request.headers.get("x-forwarded-for", "").split(",")):
            told = told.strip()
            if not _is_address(told):
                break
            peer = str(ipaddress.ip_address(told))
            if not self.is_proxy(peer):
                break
        return peer

    def is_proxy(self, address: str) -> bool:
        """Whether what it tells of its callers is believed."""
        return bool(self._proxies) and _within(address, self._proxies)

    def may_watch(self, request: Request) -> bool:
        """Whether a call comes from where `/metrics` is read without a key."""
        return _within(self.address(request), self._watchers)

    def _source(self, request: Request) -> str:
        return _network(self.address(request))

    def count(self, key_id: str) -> dict[str, str]:
        """Count a call of a key; answers the headers that tell it what is left."""
        rate = self._of_key
        room = rate.take(key_id, time.monotonic())
        return {"ratelimit-policy": rate.policy, "ratelimit": rate.left(room)} if rate.policy else {}

    def register(self, key_id: str) -> None:
        """Count one more worker of a key, or refuse it."""
        self._registrations.take(key_id, time.monotonic())

    def hold_back(self, request: Request) -> None:
        """Refuse to look at one more unknown key from where too many bad ones came."""
        self._failures.check(self._source(request), time.monotonic())

    def failed(self, request: Request) -> None:
        """A key or token was not good."""
        AUTH_FAILURES.inc()
        self._failures.take(self._source(request), time.monotonic())

    # ── other origins ────────────────────────────────────────────────────────────────────────────────────────────

    def preflight(self, request: Request) -> Reply | None:
        """The answer to a browser that asks before it lets a page of another origin call."""
        if request.method != "OPTIONS" or "access-control-request-method" not in request.headers:
            return None
        origin = request.headers.get("origin", "")
        if origin.lower() not in self._origins:
            raise Forbidden("pages of this origin may not call; TOCSIN_CORS_ORIGINS says which", code="origin_refused")
        return Reply(status=204, headers=_ALLOWED | self._shared_with(origin))

    def share(self, request: Request, reply: Reply) -> None:
        """Let a page of an allowed origin read the answer."""
        if self._origins and (origin := request.headers.get("origin", "")).lower() in self._origins:
            reply.headers = (reply.headers or {}) | self._shared_with(origin)

    @staticmethod
    def _shared_with(origin: str) -> dict[str, str]:
        # Never with credentials: a cookie is for our own pages.
        headers = {"access-control-allow-origin": origin, "access-control-expose-headers": _EXPOSED}
        return headers | {"vary": "origin"}


def refuse_key_in_url(request: Request) -> None:
    """URLs are kept in logs, histories and referrers: a key that stood in one is not a secret any more."""
    if b"tcn_" in request.query_string or any(name.lower() in _KEY_NAMES for name, _ in request.query):
        raise BadRequest("a key never goes into a URL; send it as `Authorization: Bearer <key>`", code="key_in_url")


def _host_name(host: str) -> str:
    """A `Host` header without its port; empty if it is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2].removesuffix(".")).lower() if found else ""


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(network, strict=False) for network in listed(text))


def _is_address(text: str) -> bool:
    # What is longer is remembered nowhere: thousands of such texts would be kept below.
    return len(text) <= _LONGEST_NAME and _reads_as_address(text)


@functools.lru_cache(4096)
def _reads_as_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@functools.lru_cache(4096)
def _within(address: str, ranges: tuple[Network, ...]) -> bool:
    return _is_address(address) and any(ipaddress.ip_address(address) in each for each in ranges)


@functools.lru_cache(4096)
def _network(address: str) -> str:
    """An IPv6 caller has at least a /64 of addresses to call from: they count as one."""
    if ":" not in address or not _is_address(address):
        return address
    found = ipaddress.IPv6Address(address)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
