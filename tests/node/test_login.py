"""Login with a browser, against an issuer over real HTTP: the way in, the session, and those who try others' doors."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest

from tests.conftest import Api, Cluster, InProcess
from tests.node.issuer import SECRET, TestIssuer
from tests.node.test_oidc import JOB, RULES, issuer
from tocsin.errors import SetupError
from tocsin.flow import seal as sealing
from tocsin.node.assemble import Node
from tocsin.node.server import authenticator
from tocsin.node.server.app import build
from tocsin.node.server.edge import Edge
from tocsin.node.server.login import SESSION, Logins
from tocsin.node.server.protocol import HttpServer
from tocsin.settings import Settings
from tocsin.store.vault import new_key

__all__ = ["issuer"]

ORIGIN = "https://tocsin.example.com"
OURS = {"sec-fetch-site": "same-origin", "origin": ORIGIN}


def oidc(issuer: TestIssuer, secret_file: Path, **other: Any) -> str:
    told = {"issuer": issuer.url, "audience": "tocsin", "client_id": "console", "rules": RULES, "name": "corporate"}
    return json.dumps({"issuers": [told | {"client_secret_file": str(secret_file)} | other]})


@pytest.fixture
async def node(issuer: TestIssuer, settings: Settings, tmp_path: Path) -> AsyncIterator[Node]:
    secret = tmp_path / "secret"
    secret.write_text(SECRET + "\n")
    master = base64.b64encode(new_key()).decode()
    node = Node(replace(settings, oidc=oidc(issuer, secret), public_url=ORIGIN, master_key=master))
    await node.start(loops=False)
    yield node
    await node.stop()


class Browser:
    """Keeps cookies as a browser would, and follows no redirect by itself."""

    def __init__(self, node: Node) -> None:
        self.http = httpx.AsyncClient(transport=InProcess(build(node)), base_url=ORIGIN)
        self.cookies: dict[str, str] = {}
        self.set: list[str] = []

    async def ask(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items()).encode("latin-1")
        headers = ({"cookie": cookies} if cookies else {}) | kwargs.pop("headers", {})
        reply = await self.http.request(method, path, headers=headers, **kwargs)
        self.set = reply.headers.get_list("set-cookie")
        for cookie in self.set:
            name, _, value = cookie.partition(";")[0].partition("=")
            self.cookies[name] = value
            if "Max-Age=0" in cookie:
                del self.cookies[name]
        return reply

    async def begin(self, **query: str) -> str:
        """The issuer's URL that it is sent to."""
        reply = await self.ask("GET", "/login", params=query)
        assert reply.status_code == 302, reply.text
        return reply.headers["location"]

    async def log_in(self, issuer: TestIssuer, **query: str) -> httpx.Response:
        return await self.ask("GET", issuer.authorize(await self.begin(**query)))


@pytest.fixture
def browser(node: Node) -> Browser:
    return Browser(node)


async def test_nobody_logs_in_with_a_browser_where_no_master_key_seals_the_session(
    issuer: TestIssuer, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text(SECRET)
    with pytest.raises(SetupError, match="set TOCSIN_MASTER_KEY"):
        Node(replace(settings, oidc=oidc(issuer, tmp_path / "secret")))


# ── the way in ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_whole_way(issuer: TestIssuer, browser: Browser, node: Node, cluster: Cluster) -> None:
    location = await browser.begin(issuer="corporate", next="/jobs?state=active")
    asked = dict(parse_qsl(urlsplit(location).query))
    assert asked["redirect_uri"] == f"{ORIGIN}/login/callback" and asked["response_type"] == "code"
    assert asked["code_challenge_method"] == "S256" and "openid" in asked["scope"].split()
    for secret in ("state", "nonce", "code_challenge"):
        assert len(asked[secret]) >= 43
    assert asked["state"] not in str(browser.set), "what the cookie holds is sealed"

    back = await browser.ask("GET", issuer.authorize(location))
    assert (back.status_code, back.headers["location"]) == (303, "/jobs?state=active")
    [session, ended] = browser.set
    assert session.startswith("__Host-tocsin=")
    for word in ("Path=/", "Secure", "HttpOnly", "SameSite=Lax", "Max-Age=28800"):
        assert word in session.split("; ")
    assert "Domain" not in session and ended.startswith("__Host-tocsin-login=;")

    assert (await browser.ask("GET", "/v1/jobs")).status_code == 200
    made = await browser.ask("POST", "/v1/jobs", json=JOB, headers=OURS)
    assert made.status_code == 201, made.text
    await sealing.seal(node.db)
    records = (await Api(node, cluster.keys["key"]).get("/v1/audit"))["items"]
    who = f"oidc:{issuer.url}#alice"
    assert [(r["action"], r["actor"]) for r in records[:2]] == [("job.create", who), ("session.begin", who)]


async def test_a_login_is_another_session_than_the_one_before(issuer: TestIssuer, browser: Browser) -> None:
    await browser.log_in(issuer)
    first = browser.cookies[SESSION]
    await browser.log_in(issuer)
    assert browser.cookies[SESSION] != first


async def test_logging_out(issuer: TestIssuer, browser: Browser) -> None:
    await browser.log_in(issuer)
    assert (await browser.ask("GET", "/logout")).status_code == 405, "no link does it"
    assert (await browser.ask("POST", "/logout", headers={"origin": "https://evil.example"})).status_code == 403
    assert (await browser.ask("POST", "/logout", headers=OURS)).status_code == 303
    assert browser.cookies == {}
    assert (await browser.ask("GET", "/v1/jobs")).status_code == 401


EVERYWHERE = "/logout/everywhere"


@pytest.fixture
async def second(node: Node) -> AsyncIterator[Node]:
    """Another server on the same database."""
    other = Node(node.settings)
    await other.start(loops=False)
    yield other
    await other.stop()


async def test_logging_out_everywhere(
    issuer: TestIssuer, browser: Browser, node: Node, second: Node, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "_KEY_TTL", 3600.0)
    laptop, phone, stolen = browser, Browser(second), Browser(node)
    for each in (laptop, phone):
        await each.log_in(issuer)
    stolen.cookies = dict(laptop.cookies)
    bob = Browser(second)
    issuer.id_token |= {"sub": "bob"}
    await bob.log_in(issuer)
    for each in (laptop, phone, stolen, bob):
        assert (await each.ask("GET", "/v1/jobs")).status_code == 200
    [alice] = {who.key_id for _, who in node.authenticator._known.values() if who.subject}
    await second.whisper.run_once()  # it listens
    told = asyncio.Event()
    forget = second.whisper._forget
    monkeypatch.setattr(second.whisper, "_forget", lambda keys: (forget(keys), told.set()))

    assert (await laptop.ask("GET", EVERYWHERE)).status_code == 405, "no link does it"
    evil = {"origin": "https://evil.example"}
    assert (await laptop.ask("POST", EVERYWHERE, headers=evil)).json()["code"] == "cross_site"
    assert (await laptop.ask("POST", EVERYWHERE, headers=OURS)).status_code == 303
    assert laptop.cookies == {}
    assert (await stolen.ask("GET", "/v1/jobs")).status_code == 401
    assert (await stolen.ask("POST", EVERYWHERE, headers=OURS)).status_code == 401
    await node.whisper.run_once()
    await asyncio.wait_for(told.wait(), 30)
    assert (await phone.ask("GET", "/v1/jobs")).status_code == 401
    assert (await bob.ask("GET", "/v1/jobs")).status_code == 200, "who is somebody else stays"

    issuer.id_token |= {"sub": "alice"}
    await laptop.log_in(issuer)
    assert (await laptop.ask("GET", "/v1/jobs")).status_code == 200
    assert (await phone.ask("GET", "/v1/jobs")).status_code == 401, "what was before stays over"
    assert await node.authenticator.living({alice}) == {alice}
    api = Api(node, cluster.keys["key"])
    await sealing.seal(node.db)
    ends = [r for r in (await api.get("/v1/audit"))["items"] if r["action"] == "session.end_all"]
    assert [(r["actor"], r["target"]) for r in ends] == [(f"oidc:{issuer.url}#alice", f"person:{alice}")]
    refused = await api.post(EVERYWHERE, expect=403)
    assert refused["code"] == "no_session", "a key has none"


async def test_who_logged_out_everywhere_is_shown_out_though_the_news_of_it_was_lost(
    issuer: TestIssuer, browser: Browser, node: Node, second: Node
) -> None:
    phone = Browser(second)
    await phone.log_in(issuer)
    assert (await phone.ask("GET", "/v1/jobs")).status_code == 200
    [alice] = second.authenticator._stays
    assert await second.authenticator.living({alice}) == {alice}
    await browser.log_in(issuer)
    await browser.ask("POST", EVERYWHERE, headers=OURS)
    assert await second.authenticator.living({alice}) == set()
    await phone.log_in(issuer)
    assert (await phone.ask("GET", "/v1/jobs")).status_code == 200
    assert await second.authenticator.living({alice}) == {alice}, "one who is back stays"


async def test_who_has_no_role_gets_no_session(issuer: TestIssuer, browser: Browser) -> None:
    issuer.id_token = {"groups": []}
    back = await browser.log_in(issuer)
    assert (back.status_code, back.json()["code"], browser.set) == (403, "no_role", [])


async def test_who_is_not_let_in_by_the_issuer(issuer: TestIssuer, browser: Browser) -> None:
    state = dict(parse_qsl(urlsplit(await browser.begin()).query))["state"]
    for error, told in (("access_denied", "access_denied"), ("<script>", "no reason")):
        back = await browser.ask("GET", "/login/callback", params={"error": error, "state": state})
        assert (back.status_code, back.json()["code"]) == (403, "login_refused")
        assert told in back.text and "<script>" not in back.text


async def test_there_is_no_login_without_an_issuer_for_it(still_api: Api, browser: Browser) -> None:
    assert (await still_api.http.get("/login")).status_code == 404
    assert (await browser.ask("GET", "/login?issuer=another")).status_code == 404


NEXT = ("//evil.example", "///evil.example", "/\\evil.example", "https://evil.example", "\\evil.example")
ODD = ("evil.example", "javascript:alert(1)", "//a/%2f..", "", " /", "/\t/evil.example", "/\r\na: b", "/ü", "/a\\b")


@pytest.mark.parametrize("place", [*NEXT, *ODD])
async def test_nobody_is_sent_elsewhere_afterwards(browser: Browser, place: str) -> None:
    refused = await browser.ask("GET", "/login", params={"next": place})
    assert (refused.status_code, refused.json()["code"]) == (400, "bad_redirect")


async def test_cookies_stand_in_lines_of_their_own(node: Node) -> None:
    server = HttpServer(build(node))
    port = await server.start("127.0.0.1", 0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        reply = await client.post("/logout", headers={"origin": ORIGIN})
    assert reply.status_code == 303 and len(reply.headers.get_list("set-cookie")) == 2
    await server.stop(grace=1.0)


@pytest.mark.parametrize("endpoint", ["authorization_endpoint", "token_endpoint"])
@pytest.mark.parametrize("lie", ["", "http://evil.example/", "javascript:alert(1)", "//evil.example"])
async def test_an_issuer_that_leads_elsewhere(issuer: TestIssuer, browser: Browser, endpoint: str, lie: str) -> None:
    issuer.lie = {endpoint: lie}
    refused = await browser.ask("GET", "/login")
    assert (refused.status_code, refused.json()["code"]) == (503, "issuer_unavailable")


# ── other people's codes, states and tokens ──────────────────────────────────────────────────────────────────────


async def test_a_code_is_good_in_the_browser_that_asked_for_it_alone(issuer: TestIssuer, node: Node) -> None:
    mine, victim = Browser(node), Browser(node)
    back = issuer.authorize(await mine.begin())
    for browser in (Browser(node), victim):
        if browser is victim:
            await victim.begin()
        refused = await browser.ask("GET", back)
        assert (refused.status_code, refused.json()["code"]) == (400, "login_state"), "login CSRF"
        assert SESSION not in browser.cookies
    assert (await mine.ask("GET", back)).status_code == 303, "it was not used up"


async def test_a_stolen_code_does_not_fit_another_login(issuer: TestIssuer, node: Node) -> None:
    victim, thief = Browser(node), Browser(node)
    stolen = dict(parse_qsl(urlsplit(issuer.authorize(await victim.begin())).query))["code"]
    state = dict(parse_qsl(urlsplit(await thief.begin()).query))["state"]
    refused = await thief.ask("GET", "/login/callback", params={"code": stolen, "state": state})
    assert refused.json()["code"] == "login_failed" and SESSION not in thief.cookies, "PKCE"
    before = issuer.asked.count("/token")
    node.edge = Edge(replace(node.settings, auth_failures_per_address=0.1))  # one
    tried = [thief.ask("GET", "/login/callback", params={"code": f"c{n}", "state": state}) for n in range(3)]
    assert [(await reply).status_code for reply in tried] == [503, 429, 429], "nor can codes be guessed"
    assert issuer.asked.count("/token") == before + 1


async def test_an_answer_is_taken_once(issuer: TestIssuer, browser: Browser) -> None:
    back = issuer.authorize(await browser.begin())
    cookies = dict(browser.cookies)
    assert (await browser.ask("GET", back)).status_code == 303
    assert (await browser.ask("GET", back)).json()["code"] == "login_state", "the browser has forgotten it"
    browser.cookies = cookies
    assert (await browser.ask("GET", back)).json()["code"] == "login_failed", "and the issuer has, too"


async def test_an_answer_of_another_issuer(issuer: TestIssuer, browser: Browser) -> None:
    back = issuer.authorize(await browser.begin())
    evil = back.replace(urlsplit(issuer.url).netloc.replace(":", "%3A"), "evil.example")
    assert evil != back
    assert (await browser.ask("GET", evil)).json()["code"] == "login_state"


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"aud": "tocsin"},
        {"aud": ["console", "other"]},
        {"aud": ["console"], "azp": "other"},
        {"iss": "https://evil.example"},
        {"exp": 1},
        {"sub": None},
    ],
    ids=str,
)
async def test_identity_tokens_that_are_not_ours(issuer: TestIssuer, browser: Browser, claims: dict[str, Any]) -> None:
    issuer.id_token = claims
    refused = await browser.log_in(issuer)
    assert (refused.status_code, refused.json()["code"]) == (401, "login_failed")
    assert SESSION not in browser.cookies


async def test_an_identity_token_opens_nothing_by_itself(issuer: TestIssuer, node: Node) -> None:
    token = issuer.token(aud=["console", "tocsin"], azp="console", nonce="n")
    assert (await Api(node, token).http.get("/v1/jobs")).status_code == 401


# ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_session_changes_nothing_for_a_page_of_another_site(issuer: TestIssuer, browser: Browser) -> None:
    await browser.log_in(issuer)
    for headers in (
        {},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site", "origin": ORIGIN},
        {"origin": "http://tocsin.example.com.evil.example"},
        {"origin": "http://tocsin.example.com"},
        {"origin": "http://tocsin.example.com", "host": "tocsin.example.com"},
        {"origin": "http://localhost:8470", "host": "localhost:8470"},
    ):
        refused = await browser.ask("POST", "/v1/jobs", json=JOB, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "cross_site"), headers
    for headers in ({"origin": ORIGIN}, {"sec-fetch-site": "same-origin"}):
        assert (await browser.ask("PUT", f"/v1/jobs/by-name/{JOB['name']}", json=JOB, headers=headers)).is_success


async def test_a_page_is_ours_however_the_public_url_is_written(
    issuer: TestIssuer, browser: Browser, node: Node, tmp_path: Path
) -> None:
    await browser.log_in(issuer)
    for written in ("https://Tocsin.Example.com", f"{ORIGIN}:443"):
        node.logins = Logins(Node(replace(node.settings, public_url=written)))
        node.logins._node = node
        made = await browser.ask("PUT", f"/v1/jobs/by-name/{JOB['name']}", json=JOB, headers={"origin": ORIGIN})
        assert made.is_success, made.text


async def test_a_session_is_what_was_sealed_here_and_nothing_else(issuer: TestIssuer, browser: Browser) -> None:
    begun = await browser.begin()
    of_login = browser.cookies["__Host-tocsin-login"]
    await browser.ask("GET", issuer.authorize(begun))
    good = browser.cookies[SESSION]
    raw = bytearray(base64.urlsafe_b64decode(good + "=="))
    raw[-20] ^= 1
    forged = base64.urlsafe_b64encode(bytes(raw)).rstrip(b"=").decode()
    plain = base64.urlsafe_b64encode(json.dumps({"subject": "root"}).encode()).decode()
    for cookie in ("", "x", forged, plain, of_login, good[:-8], "A" * 4000, "é"):
        browser.cookies = {SESSION: cookie}
        assert (await browser.ask("GET", "/v1/jobs")).status_code == 401, cookie[:30]
    browser.cookies = {"tocsin": good}
    assert (await browser.ask("GET", "/v1/jobs")).status_code == 401, "a name that another site could set"
    browser.cookies = {SESSION: f"{good}; {SESSION}={good}"}
    assert (await browser.ask("GET", "/v1/jobs")).status_code == 401, "two of them"
    browser.cookies = {SESSION: good}
    assert (await browser.ask("GET", "/v1/jobs")).status_code == 200


async def test_a_session_ends(issuer: TestIssuer, browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    await browser.log_in(issuer)
    assert (await browser.ask("GET", "/v1/jobs")).status_code == 200
    monkeypatch.setattr(Logins, "_now", lambda _self: time.time() + 28_801)
    assert (await browser.ask("GET", "/v1/jobs")).status_code == 401


async def test_rules_are_looked_at_anew(
    issuer: TestIssuer, browser: Browser, node: Node, tmp_path: Path, settings: Settings
) -> None:
    await browser.log_in(issuer)
    changed = Node(replace(node.settings, oidc=oidc(issuer, tmp_path / "secret", rules=RULES[1:])))
    await changed.start(loops=False)
    other = Browser(changed)
    other.cookies = dict(browser.cookies)
    assert (await other.ask("GET", "/v1/jobs")).json()["code"] == "no_role"
    await changed.stop()


async def test_a_key_goes_before_a_session(issuer: TestIssuer, browser: Browser, cluster: Cluster) -> None:
    await browser.log_in(issuer)
    headers = {"authorization": f"Bearer {cluster.keys['key']}"}
    assert (await browser.ask("GET", "/v1/tenants", headers=headers)).status_code == 200
    assert (await browser.ask("GET", "/v1/tenants")).status_code == 403
    assert (await browser.ask("GET", "/v1/tenants", headers={"authorization": "Bearer x"})).status_code == 401
