"""What may be configured of issuers, what their rules give, and tokens held to them, without any issuer."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.errors import SetupError
from tocsin.model import oidc
from tocsin.model.access import Scope
from tocsin.model.oidc import Issuer, Refused, Rule, Token

RULE = {"claim": "groups", "contains": "ops", "tenant": "default", "role": "viewer"}
ISSUER = {"issuer": "https://login.example.com", "audience": "tocsin", "rules": [RULE]}
NOW = 1_800_000_000.0


def parsed(**other: Any) -> Issuer:
    given = {name: value for name, value in (ISSUER | other).items() if value is not None}
    [found] = oidc.parse(json.dumps({"issuers": [given]}))
    return found


def test_the_same_in_toml() -> None:
    text = """
        [[issuers]]
        issuer = "https://login.example.com"
        audience = "tocsin"
        [[issuers.rules]]
        claim = "groups"
        contains = "ops"
        tenant = "default"
        role = "viewer"
    """
    assert oidc.parse(text) == (parsed(),)
    assert parsed().algorithms == ("RS256",)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"issuer": "http://login.example.com"}, "https"),
        ({"issuer": "https://login.example.com?a=b"}, "https"),
        ({"issuer": "https://user@login.example.com"}, "https"),
        ({"issuer": "https://login.example.com/.well-known/openid-configuration"}, "https"),
        ({"issuer": "login.example.com"}, "https"),
        ({"issuer": "https://lögin.example.com"}, "https"),
        ({"audience": None}, "audience"),
        ({"audience": ""}, "audience"),
        ({"audience": []}, "audience"),
        ({"algorithms": []}, "algorithms"),
        ({"algorithms": ["none"]}, "none"),
        ({"algorithms": ["HS256"]}, "HS256"),
        ({"session_seconds": 1}, "session_seconds"),
        ({"rules": []}, "rules"),
        ({"rules": [RULE | {"equals": "x"}]}, "rule 1"),
        ({"rules": [RULE, {k: v for k, v in RULE.items() if k != "contains"}]}, "rule 2"),
        ({"rules": [RULE | {"role": "worker"}]}, "worker"),
        ({"rules": [RULE | {"role": "admin", "jobs": ["a"]}]}, "jobs"),
        ({"rules": [RULE | {"tenant": "No Tenant"}]}, "tenant"),
        ({"rules": [RULE | {"jobs": ["a b"]}]}, "patterns"),
        ({"rules": [RULE | {"tags": ["team"]}]}, "key:value"),
        ({"rulez": []}, "rulez"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(other: dict[str, Any], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        parsed(**other)


@pytest.mark.parametrize("text", ["", "{", "[]", "issuers = 1", '{"issuers": [1]}', "\0"])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(SetupError, match="TOCSIN_OIDC"):
        oidc.parse(text)


def test_an_issuer_stands_once() -> None:
    with pytest.raises(SetupError, match="twice"):
        oidc.parse(json.dumps({"issuers": [ISSUER, ISSUER]}))


def rule(**other: Any) -> Rule:
    return msgspec.convert({name: value for name, value in (RULE | other).items() if value is not None}, Rule)


def test_a_claim_is_found_by_its_name_or_along_a_path() -> None:
    assert rule(claim="a.b", contains=None, equals="x").fits({"a": {"b": "x"}})
    assert rule(claim="a.b", contains=None, equals="x").fits({"a.b": "x", "a": {"b": "y"}}), "the name goes before"
    assert not rule(claim="a.b", contains=None, equals="x").fits({"a": ["b", "x"]})
    assert rule(claim="scope", contains="read").fits({"scope": "write read"})
    assert not rule(claim="scope", contains="read").fits({"scope": "reader"})
    assert not rule(contains=None, equals="1").fits({"groups": 1})
    assert not rule().fits({})


def test_the_first_rule_that_fits_counts_whatever_else_does() -> None:
    issuer = parsed(rules=[RULE | {"contains": "a", "role": "admin"}, RULE | {"contains": "b", "role": "viewer"}])
    assert [issuer.granted(issuer.fitting({"groups": groups})) for groups in (["b", "a"], ["b"], ["c"])] == [
        issuer.rules[0],
        issuer.rules[1],
        None,
    ]
    assert issuer.granted(["groups has b", "groups has forgotten"]) == issuer.rules[1], "of a session from before"


def test_a_rule_may_be_kept_to_jobs() -> None:
    assert rule().scope is None
    assert rule(jobs=["report-*"], tags=["team:ops"]).scope == Scope(("report-*",), (("team", "ops"),))


def checked(issuer: Issuer | None = None, kind: str | None = "JWT", **claims: Any) -> None:
    good = {"iss": ISSUER["issuer"], "aud": "tocsin", "sub": "alice", "exp": NOW + 60}
    told = {name: value for name, value in (good | claims).items() if value is not None}
    oidc.check_access(issuer or parsed(), Token("RS256", "k", told, b"", b"", kind), NOW)


def test_clocks_may_differ_by_half_a_minute() -> None:
    checked(exp=NOW - 29, nbf=NOW + 29, iat=NOW + 29)
    for claims in ({"exp": NOW - 31}, {"nbf": NOW + 31}, {"iat": NOW + 31}, {"exp": NOW + 86_500}):
        with pytest.raises(Refused):
            checked(**claims)


def test_one_of_several_audiences_is_enough() -> None:
    several = parsed(audience=["tocsin", "other"])
    checked(several, aud=["x", "other"])
    with pytest.raises(Refused, match="somebody else"):
        checked(several, aud=["x"])


@pytest.mark.parametrize("audience", ["console", ["console"], ["tocsin", "console"], ["tocsin", "cli"]])
def test_what_is_made_for_a_client_must_say_that_it_is_for_access(audience: Any) -> None:
    issuer = parsed(audience=["tocsin", "console"], client_id="console", clients=["cli"])
    for kind, claim in (("JWT", None), (None, None), ("JWT", "x"), ("JWT", 1)):
        with pytest.raises(Refused, match="identity token"):
            checked(issuer, kind, aud=audience, typ=claim, azp="cli")
    for kind, claim in (("at+jwt", None), ("application/AT+JWT", None), ("JWT", "Bearer")):
        checked(issuer, kind, aud=audience, typ=claim, azp="cli")
    checked(issuer, "JWT", aud="tocsin", azp="cli")


@pytest.mark.parametrize("kind", [None, "JWT", "at+jwt", "AT+JWT", "application/at+jwt"])
def test_types_of_access_tokens(kind: str | None) -> None:
    checked(kind=kind)


@given(st.text(max_size=400) | st.lists(st.binary(max_size=60), min_size=3, max_size=3))
def test_whatever_is_brought_is_a_token_or_refused(text: str | list[bytes]) -> None:
    if isinstance(text, list):
        text = ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in text)
    with pytest.raises(Refused):
        oidc.read(text)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("iss", "aud", "sub", "exp", "nbf", "iat", "azp", "client_id", "typ", "groups", "nonce")


@given(st.dictionaries(st.sampled_from(NAMES), json_values))
def test_whatever_claims_hold_they_are_checked_or_refused(claims: dict[str, Any]) -> None:
    token = Token("RS256", None, claims, b"", b"")
    issuer = parsed(clients=["cli"], client_id="console")
    for check in (lambda: oidc.check_access(issuer, token, NOW), lambda: oidc.check_identity(issuer, token, NOW, "n")):
        with pytest.raises(Refused):
            check()
    assert issuer.granted(issuer.fitting(claims)) in (None, issuer.rules[0])
