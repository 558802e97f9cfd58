"""What an http target sends: templates that nothing can break out of, signatures, redirects, and when to come back."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.errors import InvalidInput
from tocsin.model.httpcall import (
    BadCall,
    Call,
    call_of,
    error_class,
    is_expected,
    redirected,
    retry_after,
    signed,
    wrong_call,
)
from tocsin.model.job import JobSpec, check
from tocsin.model.targets import HttpTarget

NOW = datetime(2026, 12, 1, 9, tzinfo=UTC)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def target(url: str = "https://api.example.com/x", **more: Any) -> HttpTarget:
    return msgspec.convert({"kind": "http", "url": url, **more}, HttpTarget)


def made(args: Any = None, secrets: dict[str, str] | None = None, **more: Any) -> Call:
    return call_of(target(**more), args, secrets or {}, {"Tocsin-Run-Id": "r", "Accept": "*/*"})


# ── what a job may say ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "gopher://x/1", "ftp://x", "//x", "x", "http://", "https:///x", "javascript:alert(1)"),
        *(
            "http://user@x/",
            "http://user:pw@x/",
            "http://x@y",
            "http://x\\@y/",
            "http://x/a b",
            "http://x/\n",
            "http://x/é",
        ),
        *(
            "http://x:0/",
            "http://x:65536/",
            "http://x:port/",
            "http://x#f",
            "http://é.example/",
            "http://[fe80::1%25e]/",
        ),
        *("http://{args.host}/", "http://x{args.y}.example/", "http://x%2ey/", "http://[::1", "http://x:80:90/"),
        *("http://x/{secrets.TOKEN}", "http:/x", "http:\\\\x"),
    ],
)
def test_a_url_that_is_not_plain_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(JobSpec(target=target(url)))
    assert [e["path"] for e in refused.value.errors or []] == ["target.url"]


@pytest.mark.parametrize(
    "url",
    ["http://x", "https://x.example:8443/a/b?c=d&e={args.f}", "http://127.0.0.1/", "http://[::1]:80/", "HTTP://X/"],
)
def test_a_plain_url_is_taken(url: str) -> None:
    check(JobSpec(target=target(url)))  # whom it leads to is found out when it is dialled


@pytest.mark.parametrize(
    ("more", "path"),
    [
        *(({"headers": {name: "x"}}, f"target.headers.{name}") for name in ("Host", "content-length", "TE", "Upgrade")),
        *(({"headers": {name: "x"}}, f"target.headers.{name}") for name in ("Tocsin-Run-Id", "webhook-id", "Proxy-X")),
        ({"headers": {"X": "a\r\nEvil: 1"}}, "target.headers.X"),
        ({"headers": {"X": "\0"}}, "target.headers.X"),
        ({"headers": {"a b": "x"}}, "target.headers.a b"),
        ({"headers": {"": "x"}}, "target.headers."),
        ({"headers": {"X": "x" * 20_000}}, "target.headers"),
        ({"method": "CONNECT"}, "target.method"),
        ({"method": "TRACE"}, "target.method"),
        ({"sign_with": "KEY"}, "target.sign_with"),
        ({"headers": {"X": "{secrets.KEY}"}}, "target"),
        ({"body": {"deep": ["{secrets.KEY}"]}}, "target"),
    ],
)
def test_what_no_request_may_have_is_refused(more: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(JobSpec(target=target(**more)))
    assert [e["path"] for e in refused.value.errors or []] == [path]


def test_secrets_that_the_job_has_may_be_named() -> None:
    body = {"deep": ["{secrets.KEY}"]}
    named = target(body=body, sign_with="KEY", headers={"A": "Bearer {secrets.KEY}"})
    assert list(wrong_call(named, {"KEY": "k"})) == [] and list(wrong_call(named, {}))


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_arguments_are_the_body_unless_there_is_one() -> None:
    sent = made({"a": 1})
    assert (sent.method, sent.url, sent.body) == ("POST", "https://api.example.com/x", b'{"a":1}')
    assert sent.headers == {"Content-Type": "application/json", "Tocsin-Run-Id": "r", "Accept": "*/*"}
    assert made().body == b"{}"
    got = made({"a": 1}, method="GET")
    assert got.body is None and "Content-Type" not in got.headers and got.headers["Tocsin-Args"] == '{"a":1}'
    assert "Tocsin-Args" not in made({"a": "x" * 5000}, method="GET").headers
    assert "Tocsin-Args" not in made({"a": "é"}, method="GET").headers
    own = made({"a": 1}, body={"b": 2})
    assert own.body == b'{"b":2}' and own.headers["Tocsin-Args"] == '{"a":1}'


def test_a_body_names_arguments_and_secrets() -> None:
    args = {"n": 5, "who": {"name": "Ada"}, "list": [1, 2], "yes": True}
    body = {
        "n": "{args.n}",
        "text": "hi {args.who.name}, {args.n}, {args.yes}",
        "all": "{args.list}",
        "s": "{secrets.K}",
    }
    assert json.loads(made(args, {"K": "k\n"}, body=body).body or b"") == {
        "n": 5,
        "text": "hi Ada, 5, true",
        "all": [1, 2],
        "s": "k\n",
    }
    text = made(args, body="{args.who} {x} {args} {{args.n}}")
    assert text.body == b'{"name":"Ada"} {x} {args} {5}'
    assert text.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert made(body="a", headers={"content-type": "text/csv"}).headers["content-type"] == "text/csv"


@pytest.mark.parametrize(
    ("args", "more"),
    [
        ({}, {"url": "http://x/{args.id}"}),
        ({"id": None}, {"url": "http://x/{args.id}"}),
        ({"id": "."}, {"url": "http://x/{args.id}"}),
        ({"id": ".."}, {"url": "http://x/{args.id}"}),
        ({"id": ""}, {"url": "http://x/{args.id}"}),
        ({"id": "x" * 9000}, {"url": "http://x/{args.id}"}),
        ({"id": "a\r\nb"}, {"headers": {"X": "{args.id}"}}),
        ({"id": "✓"}, {"headers": {"X": "{args.id}"}}),
        ({"id": [1]}, {"body": "{args.id.x}"}),
        ({}, {"headers": {"X": "{secrets.GONE}"}}),
    ],
)
def test_arguments_that_make_no_request_are_refused(args: Any, more: dict[str, Any]) -> None:
    with pytest.raises(BadCall):
        made(args, **more)


@given(JSON.filter(lambda value: value is not None))
def test_no_argument_leaves_its_place_in_a_url(value: Any) -> None:
    try:
        url = made({"v": value}, url="https://x.example/a/{args.v}/b?q={args.v}&r=1").url
    except BadCall:
        assert value in ("", ".", "..")
        return
    parts = urlsplit(url)
    assert url.isascii() and (parts.scheme, parts.netloc, parts.fragment) == ("https", "x.example", "")
    before, middle, after = parts.path[1:].split("/")
    plain = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    assert (before, unquote(middle), after) == ("a", plain, "b") and parts.query == f"q={middle}&r=1"


@given(JSON.filter(lambda value: value is not None))
def test_no_argument_leaves_its_place_in_headers_or_body(value: Any) -> None:
    body = {"v": "{args.v}", "t": "<{args.v}>"}
    plain = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    assert json.loads(made({"v": value}, body=body).body or b"") == {"v": value, "t": f"<{plain}>"}
    try:
        headers = made({"v": value}, headers={"X": "{args.v}"}).headers
    except BadCall:
        assert any(c in plain for c in "\r\n\0") or not plain.isprintable() or max(map(ord, plain)) > 255
        return
    assert headers["X"] == plain and not any(c in plain for c in "\r\n\0")


# ── signatures ───────────────────────────────────────────────────────────────────────────────────────────────────


def verify(secret: bytes, headers: dict[str, str], body: bytes) -> bool:
    """As a receiver does it, by the standard."""
    content = f"{headers['Webhook-Id']}.{headers['Webhook-Timestamp']}.".encode() + body
    right = base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()
    return any(one == f"v1,{right}" for one in headers["Webhook-Signature"].split(" "))


def test_a_signature_is_what_the_standard_says() -> None:
    # The example of the specification.
    key = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    found = signed(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert found["Webhook-Signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.binary(min_size=1, max_size=40), st.binary(max_size=100))
def test_a_signature_verifies_with_each_secret_and_no_other(secret: bytes, body: bytes) -> None:
    written = "whsec_" + base64.b64encode(secret).decode()
    found = signed(f"{written} plain-text", "run", 1, body)
    assert verify(secret, found, body) and verify(b"plain-text", found, body)
    assert not verify(secret + b"x", found, body) and not verify(secret, found, body + b"x")
    assert not verify(secret, found | {"Webhook-Timestamp": "2"}, body)


def test_a_secret_that_only_looks_like_one_is_refused() -> None:
    with pytest.raises(BadCall):
        signed("whsec_§", "run", 1, None)


# ── what comes back ──────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_expected() -> None:
    assert is_expected(204, ["2xx"]) and not is_expected(404, ["2xx"]) and is_expected(404, ["2xx", "404"])
    assert not is_expected(403, ["404"])
    assert [error_class(s) for s in (302, 404, 429, 408, 425, 503)] == [
        *("status_3xx", "status_4xx", "status_429", "status_408", "status_425", "status_5xx"),
    ]


@pytest.mark.parametrize(
    ("status", "headers", "wait"),
    [
        (503, {"Retry-After": "120"}, 120.0),
        (429, {"Retry-After": " 7 "}, 7.0),
        (429, {}, 0.0),
        (503, {}, None),
        (404, {"Retry-After": "5"}, None),
        (503, {"Retry-After": "-5"}, None),
        (503, {"Retry-After": "soon"}, None),
        (503, {"Retry-After": "²"}, None),
        (503, {"Retry-After": "9" * 400}, 604_800.0),
        (503, {"Retry-After": "Tue, 01 Dec 2026 09:00:30 GMT"}, 30.0),
        (503, {"Retry-After": "Tue, 01 Dec 2026 08:00:00 GMT"}, 0.0),
        (503, {"Retry-After": "Tue, 01 Dec 2026 12:00:10 GMT", "Date": "Tue, 01 Dec 2026 12:00:00 GMT"}, 10.0),
        (503, {"Retry-After": "Tue, 01 Dec 9999 12:00:10 GMT"}, 604_800.0),
        (503, {"Retry-After": "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"}, None),
        (503, {"Retry-After": "Tue, 01 Dec 2026 09:00:30 GMT", "Date": f"Tue, 01 Dec {'9' * 20} 0:0:0 GMT"}, 30.0),
    ],
)
def test_when_to_come_back(status: int, headers: dict[str, str], wait: float | None) -> None:
    assert retry_after(status, headers, NOW) == wait


FIRST = Call("POST", "https://a.example/x/y", {"Authorization": "s", "Content-Type": "text/plain"}, b"body")


@pytest.mark.parametrize(
    ("status", "location", "expected"),
    [
        (302, "/z", ("GET", "https://a.example/z", True, None)),
        (301, "z?q", ("GET", "https://a.example/x/z?q", True, None)),
        (307, "https://a.example/z#f", ("POST", "https://a.example/z", True, b"body")),
        (303, "https://b.example/", ("GET", "https://b.example/", False, None)),
        (302, "https://a.example:8443/", ("GET", "https://a.example:8443/", False, None)),
        (308, "https://b.example/", None),
        (302, "http://a.example/z", None),
        (302, "file:///etc/passwd", None),
        (302, "https://user@b.example/", None),
        (302, "https://b.example\\@a.example/", None),
        (302, "//b.example/", ("GET", "https://b.example/", False, None)),
        (302, "", ("GET", "https://a.example/x/y", True, None)),
    ],
)
def test_where_a_redirect_leads(status: int, location: str, expected: tuple[Any, ...] | None) -> None:
    found = redirected(FIRST, status, location)
    assert (found and (found.method, found.url, "Authorization" in found.headers, found.body)) == expected


def test_a_redirect_without_the_body_has_nothing_that_speaks_of_it() -> None:
    headers = FIRST.headers | signed("secret", "run", 1, FIRST.body)
    found = redirected(FIRST._replace(headers=headers), 303, "/z")
    assert found is not None and found.headers == {"Authorization": "s"}
    kept = redirected(FIRST._replace(headers=headers), 307, "/z")
    assert kept is not None and kept.headers == headers
    without_body = FIRST._replace(method="GET", body=None, headers=signed("secret", "run", 1, None))
    kept = redirected(without_body, 302, "/z")
    assert kept is not None and kept.headers == without_body.headers, "it is as true as before"
