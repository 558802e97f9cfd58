"""The edge: which names, origins and addresses a server answers, how often, and with which headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.conftest import Api
from tests.flow.kit import PROCESS, Scene
from tocsin.errors import ApiProblem, SetupError, TooManyRequests
from tocsin.node.server import http
from tocsin.node.server.app import build
from tocsin.node.server.edge import Edge, _reads_as_address, common_headers
from tocsin.node.server.protocol import HttpServer, Request
from tocsin.node.server.rates import Rate
from tocsin.settings import Settings

JOB = {"target": PROCESS, "schedule": {"manual": True}}


def request(path: str = "/v1/jobs", query: bytes = b"", method: str = "GET", **headers: str) -> Request:
    return Request(method, path, query, {name.replace("_", "-"): value for name, value in headers.items()})


def refusal(edge: Edge, asked: Request) -> str | None:
    """The code under which a request goes no further."""
    try:
        edge.admit(asked)
    except ApiProblem as error:
        return error.code
    return None


@pytest.fixture
def ask(still_api: Api) -> Callable[..., Any]:
    """Ask a node that has other settings of the edge."""

    async def ask(path: str, method: str = "GET", edge: dict[str, Any] | None = None, **kwargs: Any) -> httpx.Response:
        node = still_api.node
        if edge is not None:
            node.edge = Edge(replace(node.settings, **edge))
        return await Api(node, still_api.key).http.request(method, path, **kwargs)

    return ask


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_metrics_are_for_this_machine_for_addresses_that_are_named_and_for_the_platform(still_api: Api) -> None:
    node = still_api.node

    async def seen_from(peer: str, key: str = "", forwarded: str = "", **edge: Any) -> int:
        node.edge = Edge(replace(node.settings, **edge))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        asked = request("/metrics", **headers, **({"x_forwarded_for": forwarded} if forwarded else {}))
        asked._line = type("Line", (), {"peer": peer})()
        asked._complete = True
        return (await build(node)(asked)).status

    assert [await seen_from(peer) for peer in ("127.0.0.1", "127.9.9.9", "::1")] == [200] * 3
    assert [await seen_from(peer) for peer in ("", "10.1.2.3", "2001:db8::1", "0.0.0.0")] == [401] * 4
    assert await seen_from("10.1.2.3", metrics_from="10.1.0.0/16") == 200
    assert await seen_from("127.0.0.1", metrics_from="10.1.0.0/16") == 401
    assert await seen_from("127.0.0.1", metrics_from="") == 401
    assert await seen_from("10.1.2.3", still_api.key) == 200
    assert await seen_from("10.1.2.3", (await still_api.with_key("admin")).key) == 403
    behind = {"forwarded": "203.0.113.5", "proxies": "127.0.0.1"}
    assert await seen_from("127.0.0.1", **behind) == 401, "a proxy that is named speaks for its caller"


def test_where_metrics_may_be_read_from_is_a_list_of_networks() -> None:
    with pytest.raises(SetupError, match="metrics_from"):
        Settings(metrics_from="prometheus.internal")


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8470", "localhost.", "127.0.0.1:8470", "[::1]:8470", "10.1.2.3:80", "[2001:db8::1]"],
)
def test_names_that_are_ours_by_themselves(host: str) -> None:
    assert refusal(Edge(Settings()), request(host=host)) is None


NOT_OURS = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "evil.example:8470",
    "localhost,evil.example",
    "[::1].evil.example",
    "[localhost]",
    "0x7f000001",
    "2130706433",
    "user@localhost",
    "١٢٧.0.0.1",
    "localhost:8470:1",
    "localhost/",
]


@pytest.mark.parametrize("host", [*NOT_OURS, "", "localhost, evil.example", "evil.example\tlocalhost"])
def test_names_that_are_not(host: str) -> None:
    edge = Edge(Settings())
    assert [refusal(edge, request(host=host)) for _ in range(2)] == ["unknown_host"] * 2
    assert refusal(edge, request("/healthz", host=host)) is None, "who probes may know us by another name"
    assert refusal(edge, request("/metrics", host=host)) == "unknown_host"


def test_long_names_are_not_remembered() -> None:
    edge = Edge(Settings(proxies="192.0.2.0/24"))
    known = _reads_as_address.cache_info().currsize
    for number in range(10):
        assert refusal(edge, request(host=f"{number}" + "a" * 300)) == "unknown_host"
        forwarded = request(x_forwarded_for=f"fe80::{number}%" + "z" * 300)
        forwarded._line = type("Line", (), {"peer": "192.0.2.1"})()
        assert edge.address(forwarded) == "192.0.2.1"
    assert _reads_as_address.cache_info().currsize <= known + 1, "that of the proxy alone"


def test_names_that_are_given() -> None:
    assert refusal(Edge(Settings(host="")), request(host="")) == "unknown_host"
    edge = Edge(Settings(hosts="tocsin.internal, Ops.Example.com", public_url="https://tocsin.example.com:8443"))
    for host in ("tocsin.internal:1", "ops.example.com", "tocsin.example.com:8443", "localhost"):
        assert refusal(edge, request(host=host)) is None
    assert refusal(edge, request(host="example.com")) == "unknown_host"


async def test_a_wrong_name_is_told_what_to_do(ask: Callable[..., Any]) -> None:
    reply = await ask("/v1/jobs", headers={"host": "evil.example"})
    assert (reply.status_code, reply.json()["code"]) == (421, "unknown_host")
    assert "TOCSIN_HOSTS" in reply.json()["detail"] and "evil" not in reply.text


# ── no key in a URL ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/jobs", "/healthz", "/docs", "/nowhere"])
@pytest.mark.parametrize(
    "query", ["key=abc", "a=1&token=abc", "Access_Token=abc", "api_key=", "%6bey=abc", "q=tcn_abc"]
)
async def test_a_key_in_a_url_is_refused_everywhere(ask: Callable[..., Any], path: str, query: str) -> None:
    reply = await ask(f"{path}?{query}")
    assert (reply.status_code, reply.json()["code"]) == (400, "key_in_url")
    assert "abc" not in reply.text


# ── origins ──────────────────────────────────────────────────────────────────────────────────────────────────────

PREFLIGHT = {"origin": "https://ops.example.com", "access-control-request-method": "POST"}


async def test_no_origin_is_let_in_by_itself(ask: Callable[..., Any]) -> None:
    asked = await ask("/v1/jobs", "OPTIONS", headers=PREFLIGHT)
    called = await ask("/v1/jobs", headers={"origin": "https://ops.example.com"})
    assert (asked.status_code, asked.json()["code"], called.status_code) == (403, "origin_refused", 200)
    for reply in (asked, called):
        assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_an_origin_is_let_in_by_name(ask: Callable[..., Any]) -> None:
    allowed = {"cors_origins": "https://other.example, https://ops.example.com"}
    asked = await ask("/v1/jobs", "OPTIONS", edge=allowed, headers=PREFLIGHT)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == "https://ops.example.com"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    for path, status in (("/v1/jobs", 200), ("/v1/nothing", 404)):
        reply = await ask(path, headers={"origin": "https://ops.example.com"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, "https://ops.example.com")
        assert reply.headers["vary"] == "origin" and "access-control-allow-credentials" not in reply.headers
    for stranger in ("https://evil.example", "null", "https://ops.example.com.evil.example"):
        assert "access-control-allow-origin" not in (await ask("/v1/jobs", headers={"origin": stranger})).headers


@pytest.mark.parametrize("origins", ["*", "ops.example.com", "https://ops.example.com/", "https://a@b"])
def test_origins_that_are_none(origins: str) -> None:
    with pytest.raises(SetupError, match="cors_origins"):
        Settings(cors_origins=origins)


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_answer_has_the_headers_that_bind_a_browser(still_api: Api) -> None:
    settings = still_api.node.settings
    server = HttpServer(still_api.http._transport._respond, common=common_headers(settings))  # type: ignore[attr-defined]
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for path, status in (("/v1/jobs", 401), ("/healthz", 200), ("/docs", 200), ("/nowhere", 404)):
            reply = await client.get(path)
            policy = reply.headers.get_list("content-security-policy")
            assert (reply.status_code, len(policy)) == (status, 1)
            assert "default-src 'none'" in policy[0] and "frame-ancestors 'none'" in policy[0]
            assert "unsafe" not in policy[0], "no inline script or style"
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["referrer-policy"] == "no-referrer"
            assert reply.headers["cache-control"] == "no-store"
            assert "strict-transport-security" not in reply.headers, "not over plain HTTP"
    await server.stop(grace=1.0)


def test_https_only_is_said_where_it_binds_no_others() -> None:
    assert "max-age" in common_headers(Settings(host="0.0.0.0", tls_cert="c.pem"))["strict-transport-security"]
    assert "strict-transport-security" not in common_headers(Settings(tls_cert="c.pem"))


# ── rates ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rate_lets_a_burst_through_and_then_an_even_pace() -> None:
    rate = Rate("key", per_second=10, burst=2)
    assert rate.policy == '"key";q=20;w=2'
    left = [rate.left(rate.take("a", 100.0)) for _ in range(20)]
    assert (left[0], left[-1]) == ('"key";r=19;t=1', '"key";r=0;t=2')
    with pytest.raises(TooManyRequests) as refused:
        rate.take("a", 100.0)
    assert refused.value.headers == {"retry-after": "1", "ratelimit": '"key";r=0;t=1', "ratelimit-policy": rate.policy}
    rate.take("b", 100.0)
    rate.take("a", 100.11)
    with pytest.raises(TooManyRequests):
        rate.take("a", 100.11)
    assert rate.left(rate.take("a", 200.0)) == '"key";r=19;t=1'


def test_a_rate_forgets_those_who_were_away_longest() -> None:
    rate = Rate("address", per_second=1, burst=1, most_known=100)
    for number in range(150):
        rate.take(f"a{number}", 100.0)
    assert len(rate) == 100
    rate.take("a49", 100.0)
    with pytest.raises(TooManyRequests):
        rate.take("a149", 100.0)


async def test_a_key_has_its_rate_and_other_keys_theirs(still_api: Api) -> None:
    node = still_api.node
    node.edge = Edge(replace(node.settings, rate_per_key=0.001))  # one, and the next is far
    one, other = Api(node, still_api.key), Api(node, still_api.key)
    first = await one.http.get("/v1/jobs")
    assert (first.status_code, first.headers["ratelimit-policy"]) == (200, '"key";q=1;w=1000')
    assert first.headers["ratelimit"] == '"key";r=0;t=1000'
    node.edge = Edge(replace(node.settings, rate_per_key=0.001))
    nothing = await Api(node, still_api.key).http.get("/v1/jobs?no=thing")
    assert (nothing.status_code, nothing.headers["ratelimit"]) == (400, '"key";r=0;t=1000'), "refusals are counted, too"
    second = await other.http.get("/v1/jobs")
    assert (second.status_code, second.json()["code"]) == (429, "rate_limited")
    assert 0 < int(second.headers["retry-after"]) <= 1000 and second.headers["ratelimit"].startswith('"key";r=0;t=')


async def test_workers_are_not_held_up_by_rates(still_api: Api, worker_key: str) -> None:
    node = still_api.node
    node.edge = Edge(replace(node.settings, rate_per_key=0.001, rate_per_address=0.001))
    worker = Api(node, worker_key)
    for _ in range(3):
        await worker.post("/v1/worker/register", {"name": "w", "pool": "default", "slots": 1, "targets": ["process"]})


NO_WORKERS: dict[str, tuple[str, str, dict[str, str], int]] = {
    "nobody": ("POST", "/v1/worker/register", {"authorization": ""}, 401),
    "a viewer": ("POST", "/v1/worker/register", {}, 403),
    "a viewer where nothing is": ("GET", "/v1/worker/none/at/all", {}, 404),
    "a viewer who asks otherwise": ("GET", "/v1/worker/register", {}, 405),
    "a run": ("POST", "/v1/worker/register", {"authorization": f"Bearer tcr_1.1.{'0' * 48}"}, 401),
    "a page": ("OPTIONS", "/v1/worker/register", {"origin": "https://ours.example"}, 204),
}


@pytest.mark.parametrize("case", NO_WORKERS)
async def test_who_is_no_worker_is_counted_where_workers_call(
    still_api: Api, worker_key: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_HELD_SECONDS", 0.0)
    node, viewer = still_api.node, await still_api.with_key("viewer")
    node.edge = Edge(replace(node.settings, rate_per_address=0.001, cors_origins="https://ours.example"))
    method, path, headers, first = NO_WORKERS[case]
    if method == "OPTIONS":
        headers = headers | {"access-control-request-method": "POST"}
    node_as_viewer = Api(node, viewer.key).http
    got = [(await node_as_viewer.request(method, path, headers=headers)).status_code for _ in range(3)]
    assert got == [first, 429, 429]
    worker = Api(node, worker_key)
    await worker.post("/v1/worker/register", {"name": "w", "slots": 1, "targets": ["process"]})
    missing = f"/v1/worker/{'0' * 8}-0000-7000-8000-{'0' * 12}/claim"
    gone = [(await worker.http.post(missing, json={"slots": 1})).status_code for _ in range(3)]
    assert 429 not in gone and gone[0] >= 400, "workers from there go on, whatever they are answered"


async def test_a_key_that_is_no_workers_has_its_rate_where_workers_call(
    still_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_HELD_SECONDS", 0.0)
    node, viewer = still_api.node, await still_api.with_key("viewer")
    node.edge = Edge(replace(node.settings, rate_per_key=0.001))
    asker = Api(node, viewer.key).http
    assert [(await asker.post("/v1/worker/register", json={})).status_code for _ in range(2)] == [403, 429]


def test_an_address_has_its_rate_by_its_network() -> None:
    edge = Edge(Settings(rate_per_address=0.001, proxies="192.0.2.0/24"))

    def comes_from(peer: str, forwarded: str = "") -> str | None:
        asked = request(**({"x_forwarded_for": forwarded} if forwarded else {}))
        asked._line = type("Line", (), {"peer": peer})()
        return refusal(edge, asked)

    assert comes_from("198.51.100.1") is None
    assert comes_from("198.51.100.1") == "rate_limited"
    assert comes_from("198.51.100.1", "198.51.100.9") == "rate_limited", "nobody believes what a stranger forwards"
    assert comes_from("2001:db8::1") is None
    assert comes_from("2001:db8::ffff:2") == "rate_limited", "all of a /64 are one"
    assert comes_from("2001:db8:0:1::1") is None
    assert comes_from("192.0.2.1", "203.0.113.5") is None
    assert comes_from("192.0.2.2", "6.6.6.6, 203.0.113.5, 192.0.2.9") == "rate_limited", "whatever stands before it"
    assert comes_from("192.0.2.1", "203.0.113.6") is None


async def test_who_guesses_keys_is_held_back_and_who_has_one_is_not(still_api: Api) -> None:
    node = still_api.node
    node.edge = Edge(replace(node.settings, auth_failures_per_address=0.3))  # three at once
    assert (await still_api.http.get("/v1/jobs")).status_code == 200
    guesser = Api(node, "tcn_" + "a" * 49)
    assert [(await guesser.http.get("/v1/jobs")).status_code for _ in range(5)] == [401, 401, 401, 429, 429]
    assert (await still_api.http.get("/v1/jobs")).status_code == 200, "a key that is known goes on"
    nobody = httpx.AsyncClient(transport=guesser.http._transport, base_url="http://localhost")
    assert (await nobody.get("/v1/jobs")).status_code == 401, "to bring no key is no guess"
    assert (await nobody.get("/healthz")).status_code == 200


async def test_run_tokens_cannot_be_guessed_either(scene: Scene) -> None:
    node = scene.node
    node.edge = Edge(replace(node.settings, auth_failures_per_address=0.1))
    run = f"/v1/runs/{'0' * 8}-0000-7000-8000-{'0' * 12}/complete"
    guesser = Api(node, f"tcr_1.1.{'0' * 48}")
    assert [(await guesser.http.post(run, json={})).status_code for _ in range(3)] == [401, 429, 429]
