"""Tokens of an issuer over real HTTP: who gets in, every forgery that does not, and an issuer that fails."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from joserfc.jwk import RSAKey

from tests.cluster.cluster import until
from tests.conftest import Api, Cluster
from tests.node.issuer import KEYS, TestIssuer, b64, seal, sign
from tocsin.flow import seal as sealing
from tocsin.node.assemble import Node
from tocsin.node.server import issuers
from tocsin.node.server.protocol import Reply
from tocsin.settings import Settings

JOB = {"name": "report-1", "target": {"kind": "process", "command": ["true"]}, "schedule": {"manual": True}}
RULES = [
    {"claim": "groups", "contains": "ops", "tenant": "default", "role": "editor"},
    {"claim": "sub", "equals": "root", "tenant": "default", "role": "platform"},
    {"claim": "realm_access.roles", "contains": "reader", "tenant": "default", "role": "viewer", "jobs": ["report-*"]},
    {"claim": "scope", "contains": "tocsin:read", "tenant": "nowhere", "role": "viewer"},
]


@pytest.fixture
async def issuer() -> AsyncIterator[TestIssuer]:
    issuer = TestIssuer()
    await issuer.start()
    yield issuer
    await issuer.stop()


@pytest.fixture
async def node(issuer: TestIssuer, settings: Settings) -> AsyncIterator[Node]:
    """A node that believes the issuer."""
    told = {"issuer": issuer.url, "audience": "tocsin", "algorithms": ["RS256", "ES256", "EdDSA"], "rules": RULES}
    oidc = json.dumps({"issuers": [told | {"clients": ["cli", "ci"]}]})
    node = Node(replace(settings, oidc=oidc, auth_failures_per_address=0))
    await node.start(loops=False)
    yield node
    await node.stop()


Ask = Callable[..., Any]


@pytest.fixture
def ask(node: Node) -> Ask:
    """Ask with a token."""

    async def ask(token: str, path: str = "/v1/jobs", method: str = "GET", **kwargs: Any) -> httpx.Response:
        return await Api(node, token).http.request(method, path, **kwargs)

    return ask


def good(issuer: TestIssuer, **claims: Any) -> str:
    return issuer.token(azp="cli", **claims)


async def test_who_has_a_good_token_gets_in_and_the_audit_says_who(
    issuer: TestIssuer, ask: Ask, node: Node, cluster: Cluster
) -> None:
    made = await ask(good(issuer), method="POST", json=JOB)
    assert made.status_code == 201, made.text
    await sealing.seal(node.db)
    audit = await Api(node, cluster.keys["key"]).get("/v1/audit", params={"target": f"job:{made.json()['id']}"})
    assert [record["actor"] for record in audit["items"]] == [f"oidc:{issuer.url}#alice"]
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"], "asked once, not at every call"


@pytest.mark.parametrize(("key", "algorithm"), [("rsa", "RS256"), ("ec", "ES256"), ("ed", "EdDSA")])
async def test_each_algorithm_that_is_listed(issuer: TestIssuer, ask: Ask, key: str, algorithm: str) -> None:
    assert (await ask(issuer.token(key, algorithm, azp="cli"))).status_code == 200


async def test_rules_give_tenant_role_and_jobs_and_the_first_that_fits_counts(issuer: TestIssuer, ask: Ask) -> None:
    assert (await ask(good(issuer), "/v1/keys")).status_code == 403, "an editor"
    assert (await ask(good(issuer, sub="root"), "/v1/keys")).status_code == 403, "still one: the first rule counts"
    root = good(issuer, sub="root", groups=None)
    assert (await ask(root, "/v1/tenants")).status_code == 200
    assert (await ask(root, headers={"tocsin-tenant": "default"})).status_code == 200
    await ask(good(issuer), method="POST", json=JOB)
    await ask(good(issuer), method="POST", json=JOB | {"name": "other"})
    reader = good(issuer, groups=[], realm_access={"roles": ["x", "reader"]})
    assert [job["name"] for job in (await ask(reader)).json()["items"]] == ["report-1"], "kept to its jobs"
    assert (await ask(reader, method="POST", json=JOB)).status_code == 403
    for nothing in ("nops", ["OPS"], {"ops": 1}, [["ops"]], 7):
        refused = await ask(good(issuer, groups=nothing))
        assert (refused.status_code, refused.json()["code"]) == (403, "no_role"), nothing
    assert (await ask(good(issuer, groups=None, scope="tocsin:read x"))).json()["code"] == "no_role", "no such tenant"


NOW = int(time.time())
CLAIMS: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://evil.example"},
    "an issuer that looks like it": {"iss": "http://127.0.0.1\u200b"},
    "an issuer that is a list": {"iss": ["https://evil.example"]},
    "no issuer": {"iss": None},
    "another audience": {"aud": "other"},
    "no audience": {"aud": None},
    "an audience that begins like it": {"aud": "tocsin2"},
    "an audience that looks like it": {"aud": "tоcsin"},
    "an audience of objects": {"aud": [{"tocsin": 1}]},
    "another client": {"azp": "evil"},
    "no client": {"azp": None},
    "a client that is a list": {"azp": ["cli"]},
    "over": {"exp": NOW - 60},
    "no end": {"exp": None},
    "an end that is a text": {"exp": str(NOW + 600)},
    "an end that is true": {"exp": True},
    "an end far away": {"exp": NOW + 10 * 86_400},
    "an end beyond all": {"exp": 1e300},
    "not yet": {"nbf": NOW + 86_400},
    "a beginning that is a text": {"nbf": "0"},
    "issued tomorrow": {"iat": NOW + 86_400},
    "nobody": {"sub": None},
    "nobody by an empty name": {"sub": ""},
    "somebody with a long name": {"sub": "a" * 256},
    "somebody with a line of his own": {"sub": "alice\nkey:admin"},
    "somebody written backwards": {"sub": "\u202eecila"},
    "an identity token": {"nonce": "n"},
    "an identity token by its hash": {"at_hash": "h"},
    "an identity token by its type": {"typ": "ID"},
    "a refresh token": {"typ": "Refresh"},
}


@pytest.mark.parametrize("claims", CLAIMS.values(), ids=CLAIMS)
async def test_claims_that_are_not_ours(issuer: TestIssuer, ask: Ask, claims: dict[str, Any]) -> None:
    refused = await ask(issuer.token(**({"azp": "cli"} | claims)))
    assert refused.status_code == 401
    assert refused.text == (await ask("not.a.token")).text, "nobody is told what to do better"
    assert (await ask(good(issuer))).status_code == 200


def forgeries(issuer: TestIssuer) -> dict[str, str]:
    """Tokens that are wrong in what holds the claims together; the claims are right."""
    head = {"alg": "RS256", "typ": "at+jwt", "kid": "rsa"}
    claims, mine = issuer.claims(azp="cli"), RSAKey.generate_key(2048, {"kid": "rsa"})
    whole = json.dumps(claims)
    header, body, signature = good(issuer).split(".")
    public = KEYS["rsa"].as_pem(private=False)
    shared = f"{b64(json.dumps(head | {'alg': 'HS256'}).encode())}.{body}"
    unsigned = b64(json.dumps({"alg": "none", "typ": "JWT"}).encode())
    of_evil = {"jku": "https://evil.example/keys", "x5u": "https://evil.example/x5u", "x5c": ["AA=="]}
    told = b64(json.dumps(claims | {"groups": ["ops"], "sub": "root"}).encode())

    def with_head(key: str = "rsa", algorithm: str = "RS256", **other: Any) -> str:
        return sign(head | {"alg": algorithm, "kid": key} | other, claims, KEYS[key], algorithm)

    return {
        "no algorithm": f"{unsigned}.{body}.",
        "no algorithm, with a signature": f"{unsigned}.{body}.{signature}",
        "None": sign(head | {"alg": "None"}, claims, KEYS["rsa"], "RS256"),
        "HS256 with the public key": f"{shared}.{b64(hmac.digest(public, shared.encode(), 'sha256'))}",
        "HS256 with a key that is published": sign(head | {"alg": "HS256", "kid": "oct"}, claims, KEYS["oct"], "HS256"),
        "an algorithm that is not listed": with_head(algorithm="PS256"),
        "the algorithm of another key": sign(head | {"kid": "ec"}, claims, KEYS["rsa"], "RS256"),
        "a key that is too short": with_head("short"),
        "a key of one's own": sign(head, claims, mine, "RS256"),
        "a key of one's own, brought along": sign(head | {"jwk": mine.as_dict(private=False)}, claims, mine, "RS256"),
        "a key of one's own, elsewhere": sign(head | of_evil, claims, mine, "RS256"),
        "an unknown key": sign(head | {"kid": "unknown"}, claims, mine, "RS256"),
        "no name of a key": sign({"alg": "RS256"}, claims, mine, "RS256"),
        "a path for a key": sign(head | {"kid": "../../../../dev/null"}, claims, mine, "RS256"),
        "SQL for a key": sign(head | {"kid": "' or 1=1 --"}, claims, mine, "RS256"),
        "a number for a key": sign(head | {"kid": 1}, claims, KEYS["rsa"], "RS256"),
        "an object for a key": sign(head | {"kid": {"rsa": 1}}, claims, KEYS["rsa"], "RS256"),
        "a long name of a key": sign(head | {"kid": "a" * 300}, claims, KEYS["rsa"], "RS256"),
        "what is critical": with_head(crit=["exp"], exp=1),
        "not base64": with_head(b64=False, crit=["b64"]),
        "compressed": with_head(zip="DEF"),
        "another type": with_head(typ="logout+jwt"),
        "a type that is a number": with_head(typ=1),
        "an algorithm that is a list": sign(head | {"alg": ["RS256"]}, claims, KEYS["rsa"], "RS256"),
        "other claims": f"{header}.{told}.{signature}",
        "no signature": f"{header}.{body}.",
        "half a signature": f"{header}.{body}.{signature[: len(signature) // 2]}",
        "padding": f"{header}.{body}.{signature}==",
        "other letters": f"{header}.{body}.{signature[:-1]}+",
        "another way to write it": f"{header}.{body}.{_other_way(signature)}",
        "four parts": f"{header}.{body}.{signature}.{signature}",
        "five parts, as if encrypted": f"{header}.{body}.{signature}.{signature}.{signature}",
        "a claim twice": seal(json.dumps(head), whole[:-1] + ', "aud": "tocsin"}', KEYS["rsa"], "RS256"),
        "a claim twice, once escaped": seal(
            json.dumps(head), '{"\\u0061ud": "other", ' + whole[1:], KEYS["rsa"], "RS256"
        ),
        "the algorithm twice": seal('{"alg": "none", ' + json.dumps(head)[1:], whole, KEYS["rsa"], "RS256"),
        "claims in a list": seal(json.dumps(head), f"[{whole}]", KEYS["rsa"], "RS256"),
        "claims that are none": seal(json.dumps(head), "null", KEYS["rsa"], "RS256"),
        "an end that is no number": seal(
            json.dumps(head), json.dumps(claims | {"exp": float("inf")}), KEYS["rsa"], "RS256"
        ),
        "claims that go deep": seal(
            json.dumps(head), whole[:-1] + ', "x": ' + "[" * 2000 + "]" * 2000 + "}", KEYS["rsa"], "RS256"
        ),
        "a token that is too long": sign(head, claims | {"x": "a" * 8192}, KEYS["rsa"], "RS256"),
        "letters of elsewhere": f"{header}.{body}.{signature[:-1]}\u00e9",
    }


def _other_way(signature: str) -> str:
    """The same bytes: the last letter has bits that mean nothing."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    return signature[:-1] + letters[letters.index(signature[-1]) ^ 1]


async def test_forgeries(issuer: TestIssuer, ask: Ask) -> None:
    assert (await ask(good(issuer))).status_code == 200
    said = set()
    for name, token in forgeries(issuer).items():
        try:
            refused = await ask(token)
        except UnicodeEncodeError:  # httpx sends no such header
            refused = await ask("x", headers={"authorization": b"Bearer " + token.encode()})
        assert refused.status_code == 401, name
        said.add(refused.text)
    assert len(said) == 1, "nobody is told what to do better"
    assert len(issuer.asked) <= 4, "at most one more look for unknown keys"
    assert (await ask(good(issuer))).status_code == 200


async def test_headers_that_bring_keys_along_are_not_looked_at(issuer: TestIssuer, ask: Ask) -> None:
    brought = {"jku": f"{issuer.url}/elsewhere", "x5u": f"{issuer.url}/elsewhere", "jwk": {"kty": "RSA"}}
    assert (await ask(issuer.token(azp="cli", header=brought))).status_code == 200, "signed by the right key, after all"
    assert "/elsewhere" not in issuer.asked


async def test_without_issuers_no_token_is_one(still_api: Api, issuer: TestIssuer) -> None:
    reply = await Api(still_api.node, good(issuer)).http.get("/v1/jobs")
    assert (reply.status_code, issuer.asked) == (401, [])


# ── keys that come and go, and an issuer that fails ──────────────────────────────────────────────────────────────


async def test_a_new_key_is_found_but_not_at_every_question(
    issuer: TestIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await ask(good(issuer))).status_code == 200
    issuer.published.append("later")
    later = issuer.token("later", azp="cli")
    assert (await ask(later)).status_code == 401, "asked half a minute ago at most"
    monkeypatch.setattr(issuers, "_AGAIN_SECONDS", 0.0)
    assert (await ask(later)).status_code == 200
    monkeypatch.setattr(issuers, "_AGAIN_SECONDS", 30.0)
    before = len(issuer.asked)
    unknown = [
        sign({"alg": "RS256", "kid": f"k{n}"}, issuer.claims(azp="cli"), KEYS["rsa"], "RS256") for n in range(50)
    ]
    assert {reply.status_code for reply in await asyncio.gather(*map(ask, unknown))} == {401}
    assert len(issuer.asked) == before


async def test_all_who_wait_share_one_question(issuer: TestIssuer, ask: Ask) -> None:
    issuer.hold = asyncio.Event()
    waiting = [asyncio.ensure_future(ask(good(issuer, sub=f"s{n}"))) for n in range(20)]
    while not issuer.asked:
        await asyncio.wait(waiting, timeout=0.01)
    issuer.hold.set()
    assert {reply.status_code for reply in await asyncio.gather(*waiting)} == {200}
    assert len(issuer.asked) == 2


async def test_a_key_that_was_withdrawn_is_forgotten(
    issuer: TestIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await ask(good(issuer))).status_code == 200
    issuer.published.remove("rsa")
    monkeypatch.setattr(issuers, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(issuers, "_AGAIN_SECONDS", 0.0)
    assert (await ask(good(issuer, sub="bob"))).status_code == 200, "nobody waits for what is fetched meanwhile"

    async def fetched() -> bool:
        return (await ask(good(issuer, sub="carol"))).status_code == 401

    await until("the new list is there", fetched)


async def test_an_issuer_that_is_down_is_believed_by_its_last_keys_for_a_while(
    issuer: TestIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await ask(good(issuer))).status_code == 200
    issuer.down = True
    monkeypatch.setattr(issuers, "_FRESH_SECONDS", 0.0)
    monkeypatch.setattr(issuers, "_AGAIN_SECONDS", 0.0)
    assert (await ask(good(issuer, sub="bob"))).status_code == 200
    monkeypatch.setattr(issuers, "_KEPT_SECONDS", 0.0)
    refused = await ask(good(issuer, sub="carol"))
    assert (refused.status_code, refused.json()["code"]) == (503, "issuer_unavailable")
    assert refused.headers["retry-after"]
    issuer.down = False
    monkeypatch.setattr(issuers, "_KEPT_SECONDS", 3600.0)
    assert (await ask(good(issuer, sub="carol"))).status_code == 200


@pytest.mark.parametrize(
    "lie",
    [
        {"issuer": "https://evil.example"},
        {"jwks_uri": "http://keys.example/keys"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": 7},
        {"issuer": None},
    ],
)
async def test_what_an_issuer_cannot_say_of_itself(issuer: TestIssuer, ask: Ask, lie: dict[str, Any]) -> None:
    issuer.lie = lie
    refused = await ask(good(issuer))
    assert (refused.status_code, refused.json()["code"]) == (503, "issuer_unavailable")


async def test_a_page_that_lists_no_keys_is_not_a_list_of_none(
    issuer: TestIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await ask(good(issuer))).status_code == 200
    issuer.lie = {"jwks_uri": f"{issuer.url}/.well-known/openid-configuration"}
    monkeypatch.setattr(issuers, "_AGAIN_SECONDS", 0.0)
    unknown = sign({"alg": "RS256", "kid": "unknown"}, issuer.claims(azp="cli"), KEYS["rsa"], "RS256")
    assert (await ask(unknown)).status_code == 401, "they were asked anew"
    assert (await ask(good(issuer, sub="bob"))).status_code == 200, "the last good list stays"


@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=302, headers={"location": "http://127.0.0.1:1/"}),
        Reply(b" " * 300_000 + b"{}"),
        Reply(b"<html>"),
        Reply(b"[]"),
        Reply(b"{}", 404),
    ],
    ids=["a redirect", "a flood", "no JSON", "no object", "nothing"],
)
async def test_answers_that_are_none(issuer: TestIssuer, ask: Ask, reply: Reply) -> None:
    issuer.reply = reply
    assert (await ask(good(issuer))).status_code == 503
    assert len(issuer.asked) == 1
    assert (await ask(good(issuer, sub="bob"))).status_code == 503
    assert len(issuer.asked) == 1, "nor is it asked again at once"


async def test_an_issuer_that_does_not_answer_holds_nobody_for_long(
    issuer: TestIssuer, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuers, "_TIMEOUT_SECONDS", 0.1)
    issuer.hold = asyncio.Event()
    assert (await ask(good(issuer))).status_code == 503
    issuer.hold.set()


# ── who stays longer than a call ─────────────────────────────────────────────────────────────────────────────────


async def test_who_stays_is_alive_until_the_token_ends(issuer: TestIssuer, ask: Ask, node: Node) -> None:
    await ask(good(issuer))
    [(key_id, stay)] = node.authenticator._stays.items()
    assert await node.authenticator.living({key_id, "00000000-0000-0000-0000-000000000001"}) == {key_id}
    node.authenticator._stays[key_id] = stay._replace(until=time.time() - 1)
    assert await node.authenticator.living({key_id}) == set()
