"""Target `http`: what is sent, what is made of what comes back, and above all whom it never dials."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests import PATIENCE
from tocsin.model.loglines import clean
from tocsin.wire import Finished, StopOrder
from tocsin.worker.executors import Why
from tocsin.worker.executors.http import KEPT_BYTES, Resolver
from tocsin.worker.targets import Resources

from .conftest import started
from .http_kit import Caller, Names, Site, calling, served


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    async with calling() as made:
        yield made


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with served() as made:
        yield made


@pytest.fixture
async def canary() -> AsyncIterator[list[object]]:
    """Listens on this machine where no job has any business; who connects is noted."""
    touched: list[object] = []

    def note(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        touched.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(note, ["127.0.0.2", "::1"], 0)
    async with server:
        touched.append(server.sockets[0].getsockname()[1])
        yield touched
    assert len(touched) == 1, f"somebody was let through: {touched[1:]}"


def error_of(end: Finished) -> tuple[str, str | None]:
    return end.outcome, None if end.error is None else end.error.class_


def result_of(end: Finished) -> dict[str, Any]:
    return msgspec.msgpack.decode(end.result)  # type: ignore[no-any-return]


# ── whom it never dials ──────────────────────────────────────────────────────────────────────────────────────────

LITERAL = [
    *(
        "127.0.0.1",
        "127.0.0.2",
        "127.1",
        "127.0.1",
        "2130706434",
        "0x7f000002",
        "0177.0.0.2",
        "0x7f.0.0.2",
        "017700000002",
    ),
    *("0", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "100.100.100.200"),
    *("192.0.0.192", "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "192.88.99.1"),
    *("[::1]", "[::]", "[::ffff:127.0.0.2]", "[::ffff:7f00:2]", "[::127.0.0.2]", "[::ffff:0:127.0.0.2]", "[fe80::1]"),
    *("[64:ff9b::7f00:2]", "[64:ff9b::a9fe:a9fe]", "[64:ff9b:1::7f00:2]", "[2002:7f00:2::]", "[2002:a9fe:a9fe::]"),
    *("[2001:0:4136:e378:8000:63bf:80ff:fffd]", "[fd00:ec2::254]", "[fc00::1]", "[ff02::1]", "[2a00::5efe:7f00:2]"),
    "localhost",
]


@pytest.mark.parametrize("host", LITERAL)
async def test_no_way_to_write_an_address_leads_inside(caller: Caller, canary: list[object], host: str) -> None:
    end = await caller.call(f"http://{host}:{canary[0]}/", allow=["10.9.9.9"])
    assert error_of(end) == ("failed", "refused_address"), end.error


@pytest.mark.parametrize(
    "address", ["127.0.0.2", "::1", "::ffff:127.0.0.2", "169.254.169.254", "64:ff9b::7f00:2", "fe80::1%lo", "0.0.0.0"]
)
async def test_no_name_leads_inside(canary: list[object], address: str) -> None:
    async with calling(resolver=Names(evil_example=[[address]], LOCALHOST_=[[address]])) as caller:
        for name in ("evil.example", "LOCALHOST."):
            end = await caller.call(f"https://{name}:{canary[0]}/", allow=["localhost.example"])
            assert error_of(end) == ("failed", "refused_address"), end.error


async def test_what_is_dialled_is_what_was_judged_though_the_name_moves_meanwhile(
    site: Site, canary: list[object]
) -> None:
    names = Names(moving_example=[["127.0.0.1"], ["127.0.0.2"]])
    port = site.url.rpartition(":")[2]
    async with calling(resolver=names) as caller:
        end = await caller.call(f"http://moving.example:{port}/")
        assert error_of(end) == ("succeeded", None) and names.asked == ["moving.example"]
        assert site.requests[0][2]["Host"] == f"moving.example:{port}"
        again = await caller.call(f"http://moving.example:{canary[0]}/")
        assert error_of(again) == ("failed", "refused_address") and len(names.asked) == 2


async def test_of_several_addresses_only_those_are_tried_that_may_be(site: Site, canary: list[object]) -> None:
    port = site.url.rpartition(":")[2]
    async with calling(resolver=Names(both_example=[["::1", "127.0.0.2", "127.0.0.1"]])) as caller:
        assert error_of(await caller.call(f"http://both.example:{port}/")) == ("succeeded", None)


@pytest.mark.parametrize("status", ["301", "302", "303", "307", "308"])
async def test_no_redirect_leads_inside(caller: Caller, site: Site, canary: list[object], status: str) -> None:
    for inside in (f"http://127.0.0.2:{canary[0]}/", f"http://[::1]:{canary[0]}/", f"//2130706434:{canary[0]}/"):
        url = f"{site.url}/to?as={status}&url={inside}"
        followed = await caller.call(url, redirects=5, method="GET")
        assert error_of(followed) == ("failed", "refused_address"), inside
        assert error_of(await caller.call(url, method="GET")) == ("failed", "status_3xx"), "by default none is followed"


async def test_a_name_is_judged_anew_at_every_hop(site: Site, canary: list[object]) -> None:
    port = site.url.rpartition(":")[2]
    async with calling(resolver=Names(moving_example=[["127.0.0.1"], ["127.0.0.2"]])) as caller:
        end = await caller.call(f"http://moving.example:{port}/to?url=/again", redirects=5, method="GET")
        assert error_of(end) == ("failed", "refused_address") and len(site.requests) == 1


@pytest.mark.parametrize(
    "scheme", ["file:///etc/passwd", "gopher://127.0.0.2:1/x", "ftp://127.0.0.2/", "http://u@127.0.0.2/"]
)
async def test_a_redirect_leads_to_no_other_scheme(
    caller: Caller, site: Site, canary: list[object], scheme: str
) -> None:
    end = await caller.call(f"{site.url}/to?url={scheme}", redirects=5, method="GET")
    assert error_of(end) == ("failed", "status_3xx")


async def test_proxies_of_the_environment_are_not_used(
    caller: Caller, site: Site, canary: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.2:{canary[0]}")
    assert error_of(await caller.call(site.url)) == ("succeeded", None)


async def test_a_list_opens_what_it_names_and_the_setting_opens_all_that_is_inside(site: Site) -> None:
    port = site.url.rpartition(":")[2]
    async with calling() as caller:
        assert error_of(await caller.call(f"http://localhost:{port}/", allow=["localhost"])) == ("succeeded", None)
        assert error_of(await caller.call(site.url, allow=["127.0.0.0/8"])) == ("succeeded", None)
        assert error_of(await caller.call(site.url, allow=["localhost"])) == ("failed", "refused_address")
        refused = await caller.call(site.url, allow=[])
        assert refused.error is not None and "127.0.0.1 (this machine) is not dialled" in refused.error.message
    async with calling(inside=True) as caller:
        assert error_of(await caller.call(site.url, allow=[])) == ("succeeded", None)
        assert error_of(await caller.call("http://169.254.169.254/", allow=[])) == ("failed", "refused_address")


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_request_says_which_run_it_is(caller: Caller, site: Site) -> None:
    end = await caller.call(
        f"{site.url}/orders/{{args.id}}?x=%2F",
        method="PUT",
        headers={"Authorization": "Bearer {secrets.KEY}", "X-Own": "é"},
        body={"order": "{args.id}"},
        args={"id": "a/b"},
        secrets={"KEY": "s3cret"},
    )
    assert error_of(end) == ("succeeded", None)
    [(method, path, headers, body)] = site.requests
    assert (method, path, body) == ("PUT", "/orders/a%2Fb?x=%2F", b'{"order":"a/b"}')
    wanted = {
        "Host": site.url.removeprefix("http://"),
        "Authorization": "Bearer s3cret",
        "Content-Type": "application/json",
        "Idempotency-Key": end.run_id,
        "Tocsin-Run-Id": end.run_id,
        "Tocsin-Job-Id": "job-1",
        "Tocsin-Job-Name": "call",
        "Tocsin-Attempt": "2",
        "Tocsin-Fence": "77",
        "Tocsin-Scheduled-For": "2026-12-01T09:00:00.000000Z",
        "Tocsin-Logical-At": "2026-12-01T09:00:00.000000Z",
        "Accept-Encoding": "identity",
    }
    assert {name: headers.get(name) for name in wanted} == wanted
    assert not {"Tocsin-Run-Token", "Tocsin-Callback", "Webhook-Id"} & headers.keys()


async def test_a_signed_request_verifies_at_its_receiver(caller: Caller, site: Site) -> None:
    key = b"0123456789abcdef"
    secrets = {"SIGN": "whsec_" + base64.b64encode(key).decode()}
    end = await caller.call(site.url, sign_with="SIGN", secrets=secrets, args={"a": 1})
    [(_, _, headers, body)] = site.requests
    content = f"{headers['Webhook-Id']}.{headers['Webhook-Timestamp']}.".encode() + body
    mac = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    assert headers["Webhook-Signature"] == f"v1,{mac}" and headers["Webhook-Id"] == end.run_id
    missing = await caller.call(site.url, sign_with="SIGN")
    assert error_of(missing) == ("failed", "arguments") and len(site.requests) == 1


def received(secret: bytes, headers: Mapping[str, str], body: bytes, now: float) -> bool:
    """Whether a receiver believes a request, as Standard Webhooks tells it to look."""
    sent = headers["Webhook-Timestamp"]
    content = f"{headers['Webhook-Id']}.{sent}.".encode() + body
    right = "v1," + base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()
    fits = any(hmac.compare_digest(right, one) for one in headers["Webhook-Signature"].split(" "))
    return fits and abs(now - int(sent)) <= 300


async def test_a_receiver_believes_neither_another_body_nor_an_old_request(caller: Caller, site: Site) -> None:
    old, new = b"0123456789abcdef", b"fedcba9876543210"
    secrets = {"SIGN": " ".join("whsec_" + base64.b64encode(key).decode() for key in (new, old))}
    await caller.call(site.url, sign_with="SIGN", secrets=secrets, args={"amount": 1})
    [(_, _, headers, body)] = site.requests
    sent = int(headers["Webhook-Timestamp"])
    assert received(new, headers, body, sent + 299) and received(old, headers, body, sent), "both while they change"
    assert not received(b"a secret of another", headers, body, sent)
    assert not received(new, headers, body.replace(b"1", b"2"), sent), "an altered body"
    assert not received(new, headers, body, sent + 301), "an old one, sent again"
    fresh = dict(headers) | {"Webhook-Timestamp": str(sent + 301)}
    assert not received(new, fresh, body, sent + 301), "an old one that says it is new"
    assert not received(new, dict(headers) | {"Webhook-Id": "another"}, body, sent), "another's name"


async def test_arguments_that_make_no_request_send_none(caller: Caller, site: Site) -> None:
    end = await caller.call(f"{site.url}/{{args.gone}}")
    assert error_of(end) == ("failed", "arguments") and site.requests == []


async def test_a_redirect_takes_to_another_origin_nothing_that_was_meant_for_the_first(
    caller: Caller, site: Site
) -> None:
    async with served() as other:
        headers = {"Authorization": "s3cret"}
        url = f"{site.url}/to?url={other.url}/x"
        await caller.call(url, redirects=1, method="GET", headers=headers, callback=True)
        await caller.call(f"{site.url}/to?url=/same", redirects=1, method="GET", headers=headers)
        [(_, _, elsewhere, body)] = other.requests
        assert body == b"" and not {"Authorization", "Tocsin-Run-Token", "Idempotency-Key"} & elsewhere.keys()
        assert site.requests[-1][1:2] == ("/same",) and site.requests[-1][2]["Authorization"] == "s3cret"
        kept = await caller.call(f"{url}&as=307", redirects=1)
        assert error_of(kept) == ("failed", "status_3xx") and len(other.requests) == 1


# ── what comes back ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "expected", "outcome"),
    [
        ("200", ["2xx"], ("succeeded", None)),
        ("404", ["2xx", "404"], ("succeeded", None)),
        ("201", ["200"], ("failed", "status_2xx")),
        ("404", ["2xx"], ("failed", "status_4xx")),
        ("429", ["2xx"], ("failed", "status_429")),
        ("500", ["2xx"], ("failed", "status_5xx")),
        ("503", ["2xx"], ("failed", "status_5xx")),
    ],
)
async def test_a_status_decides(
    caller: Caller, site: Site, status: str, expected: list[str], outcome: tuple[str, str | None]
) -> None:
    end = await caller.call(f"{site.url}/status/{status}", expect_status=expected)
    assert error_of(end) == outcome and result_of(end)["status"] == int(status)
    assert result_of(end)["body"] == "said" and caller.ends.lines[end.run_id] == ["said"]


async def test_who_asks_to_be_left_alone_is(caller: Caller, site: Site) -> None:
    site.answer = lambda _: web.Response(status=503, headers={"Retry-After": "90"})
    assert (await caller.call(site.url)).not_before == 90.0
    site.answer = lambda _: web.Response(status=404, headers={"Retry-After": "90"})
    assert (await caller.call(site.url)).not_before is None


@pytest.mark.parametrize(
    ("body", "media_type", "shown"),
    [
        (b'{"a": [1, 2.5, null]}', "application/json", {"a": [1, 2.5, None]}),
        (b'{"a": 1}', "application/problem+json; charset=utf-8", {"a": 1}),
        (b'{"a": 1}', "text/plain", '{"a": 1}'),
        (b"{broken", "application/json", "{broken"),
        (b'{"a": 1, "a": 2}', "application/json", '{"a": 1, "a": 2}'),
        (b"[" * 1000 + b"]" * 1000, "application/json", "[" * 1000 + "]" * 1000),
        (b'{"n": ' + b"9" * 400 + b"}", "application/json", '{"n": ' + "9" * 400 + "}"),
        (b'"\\u0000"', "application/json", '"\\u0000"'),
        (b"\xff\x00x", "application/octet-stream", "\ufffd\ufffdx"),
        (b"", "text/plain", ""),
    ],
)
async def test_the_answer_is_the_result(caller: Caller, site: Site, body: bytes, media_type: str, shown: Any) -> None:
    site.answer = lambda _: web.Response(body=body, headers={"Content-Type": media_type})
    found = result_of(await caller.call(site.url))
    assert found == {"status": 200, "content_type": media_type, "bytes": len(body), "body": shown}


async def test_of_a_long_answer_the_beginning_is_the_result(caller: Caller, site: Site) -> None:
    site.answer = lambda _: web.Response(body=b"x" * (KEPT_BYTES + 1), content_type="application/json")
    found = result_of(await caller.call(site.url))
    assert found["truncated"] and found["bytes"] == KEPT_BYTES + 1 and found["body"] == "x" * KEPT_BYTES


async def test_nothing_is_unpacked(caller: Caller, site: Site) -> None:
    site.answer = lambda _: web.Response(body=b"\x1f\x8b bomb", headers={"Content-Encoding": "gzip"})
    end = await caller.call(site.url)
    assert error_of(end) == ("succeeded", None) and result_of(end)["bytes"] == 7


@contextlib.asynccontextmanager
async def raw(*words: bytes, stay: bool = False) -> AsyncIterator[str]:
    """An endpoint that says these words, whatever it is asked, and hangs up unless it is to stay."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            for word in words:
                writer.write(word)
                await writer.drain()
            if stay:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"], "protocol"),
        ([b"nonsense\r\n\r\n"], "protocol"),
        ([b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"], "protocol"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "protocol"),
        ([], "connect"),
    ],
)
async def test_an_answer_that_is_none(caller: Caller, words: list[bytes], outcome: str) -> None:
    async with raw(*words) as url:
        assert error_of(await caller.call(url)) == ("failed", outcome)


async def test_nobody_there(caller: Caller) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        end = await caller.call(f"http://127.0.0.1:{taken.getsockname()[1]}/")
    assert error_of(end) == ("failed", "connect")


async def test_a_name_that_does_not_exist(caller: Caller) -> None:
    assert error_of(await caller.call("http://no-such-host.invalid/")) == ("failed", "connect")


async def test_an_answer_that_does_not_come_or_does_not_end(caller: Caller, site: Site) -> None:
    end = await caller.call(f"{site.url}/wait", timeout=0.3)
    assert error_of(end) == ("timeout", "timeout") and end.ran_ms >= 300
    async with raw(b"HTTP/1.1 200 OK\r\n\r\n", b"drip", stay=True) as url:
        assert error_of(await caller.call(url, timeout=0.3)) == ("timeout", "timeout")


async def test_limits_that_nobody_can_hold_an_endpoint_to_are_said_to_be_none(caller: Caller, site: Site) -> None:
    end = await caller.call(site.url, resources=Resources(memory_mb=64))
    assert end.usage == {"enforced": {"memory_mb": False}}


# ── stopping, and many at once ───────────────────────────────────────────────────────────────────────────────────


async def test_a_stop_hangs_up_and_a_loss_tells_why(caller: Caller, site: Site) -> None:
    first, second = (caller.start(f"{site.url}/wait") for _ in range(2))
    await site.until_waiting(2)
    caller.executor.stop(first)
    assert error_of(await caller.ends.of(first)) == ("cancelled", None)
    caller.executor.stop(first)  # nothing happens to one that has ended
    await caller.executor.kill_all(Why("drained", "it was drained"))
    assert error_of(await caller.ends.of(second)) == ("lost", "drained")


async def test_what_is_stopped_before_its_first_step_ends_too(caller: Caller, site: Site) -> None:
    first, second = (caller.start(site.url) for _ in range(2))
    caller.executor.stop(first)
    await caller.executor.kill_all(Why("drained", "it was drained"))
    assert error_of(await caller.ends.of(first))[0] in ("cancelled", "lost")
    assert error_of(await caller.ends.of(second)) == ("lost", "drained") and site.requests == []


async def test_an_upload_that_nobody_reads_is_hung_up_on_at_once(caller: Caller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        attempt = caller.start(f"http://127.0.0.1:{server.getsockname()[1]}/", body="x" * 30_000_000)
        loop = asyncio.get_running_loop()
        server.setblocking(False)
        peer, _ = await loop.sock_accept(server)
        with peer:
            assert await loop.sock_recv(peer, 4) == b"POST"
            caller.executor.stop(attempt)
            assert error_of(await caller.ends.of(attempt)) == ("cancelled", None)
            async with asyncio.timeout(PATIENCE):
                size = 0
                with contextlib.suppress(ConnectionError):
                    while data := await loop.sock_recv(peer, 1 << 20):
                        size += len(data)
            assert size < 30_000_000, "the rest was never sent"


async def test_a_202_is_no_end_if_the_job_waits_for_a_call(caller: Caller, site: Site) -> None:
    plain = await caller.call(f"{site.url}/status/202")
    assert error_of(plain) == ("succeeded", None)
    at_once = await caller.call(f"{site.url}/status/200", callback=True)
    assert error_of(at_once) == ("succeeded", None)
    waits = caller.start(f"{site.url}/status/202", callback=True)
    late = await caller.call(f"{site.url}/status/202", callback=True, timeout=0.3)
    assert error_of(late) == ("timeout", "timeout") and waits.run.run_id not in caller.ends.ends
    told = site.requests[-1][2]
    assert told["Tocsin-Run-Token"] == "the-token"
    assert told["Tocsin-Callback"] == f"http://tocsin.example/v1/runs/{told['Tocsin-Run-Id']}/complete"
    caller.executor.stop(waits)
    assert error_of(await caller.ends.of(waits)) == ("cancelled", None)


async def test_many_at_once_need_no_thread_each(caller: Caller, site: Site) -> None:
    before = threading.active_count()
    attempts = [caller.start(f"{site.url}/wait") for _ in range(300)]
    await site.until_waiting(300)
    assert threading.active_count() <= before
    site.go.set()
    ends = [await caller.ends.of(attempt) for attempt in attempts]
    assert {error_of(end) for end in ends} == {("succeeded", None)}


async def test_names_are_looked_up_by_the_rules_of_the_system() -> None:
    resolver = Resolver()
    found = {result["host"] for result in await resolver.resolve("localhost", 80)}
    assert found <= {"127.0.0.1", "::1"} and found
    await resolver.close()


async def test_a_run_that_ended_by_its_own_word_is_stopped_and_not_reported(site: Site) -> None:
    async with started(slots=1, heartbeat=0.2, settings={"http_private": True}) as (gateway, _):
        ended = gateway.submit({"kind": "http", "url": f"{site.url}/status/202", "callback": True})
        await gateway.line_of(ended, "said")
        gateway.stops.append(StopOrder(run_id=ended.run_id, fence=ended.fence, ended=True))
        after = gateway.submit({"kind": "http", "url": f"{site.url}/status/200"})
        assert error_of(await gateway.end_of(after)) == ("succeeded", None), "its slot is free"
        assert ended.run_id not in gateway.finished
        assert site.requests[0][2]["Tocsin-Callback"] == f"{gateway.url}/v1/runs/{ended.run_id}/complete"


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, Path]:
    """A server's context with a certificate for a name, and the file of what has signed it: itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = folder / f"{name}.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM) + secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context, pem


async def test_the_name_of_the_url_is_the_one_that_is_asked_for_and_proved(tmp_path: Path) -> None:
    context, pem = certificate(tmp_path, "secure.example")
    asked: list[str | None] = []
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    names = Names(secure_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]])
    async with (
        served(tls=context) as site,
        calling(resolver=names, tls=ssl.create_default_context(cafile=str(pem))) as caller,
    ):
        port = site.url.rpartition(":")[2]
        assert error_of(await caller.call(f"https://secure.example:{port}/")) == ("succeeded", None)
        assert asked == ["secure.example"] and site.requests[0][2]["Host"] == f"secure.example:{port}"
        assert error_of(await caller.call(f"https://other.example:{port}/")) == ("failed", "tls")
        assert error_of(await caller.call(f"https://127.0.0.1:{port}/")) == ("failed", "tls")
        assert len(site.requests) == 1
    async with served(tls=context) as site, calling(resolver=names) as stranger:
        port = site.url.rpartition(":")[2]
        assert error_of(await stranger.call(f"https://secure.example:{port}/")) == ("failed", "tls")
    async with served() as site, calling(resolver=names) as caller:
        assert error_of(await caller.call(site.url.replace("http:", "https:"))) == ("failed", "tls")


# ── bytes that are not text ──────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Run an endpoint that answers every request with these bytes. Yield its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


def head(status: str, *headers: bytes) -> bytes:
    return b"\r\n".join([f"HTTP/1.1 {status}".encode(), *headers, b"Content-Length: 2", b"", b"ok"])


ODD_ANSWERS = {
    "redirect path": (head("302 Found", b"Location: http://x/\xff\xfe"), "status_3xx"),
    "redirect host": (head("302 Found", b"Location: http://\xff\xfe.example/"), "status_3xx"),
    "redirect with escape codes": (head("302 Found", b"Location: http://x/\x1b[2J\xc2\x9b"), "status_3xx"),
    "content type": (head("200 OK", b"Content-Type: text/\xff\xfe"), None),
    "retry after": (head("503 Later", b"Retry-After: \xff\xfe", b"Date: \xff"), "status_5xx"),
    "reason": (b"HTTP/1.1 500 \xff\xfe\r\nContent-Length: 2\r\n\r\nok", "status_5xx"),
    "header name": (b"HTTP/1.1 200 OK\r\n\xff\xfe: x\r\nContent-Length: 2\r\n\r\nok", "protocol"),
    "status line": (b"\xff\xfe\xfd\r\n\r\n", "protocol"),
    "body that breaks off": (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n\xff\xfe", "protocol"),
}


def can_be_stored(end: Finished) -> bool:
    texts = [] if end.error is None else [end.error.class_, end.error.message]
    if end.result is not None:
        texts += [text for text in result_of(end).values() if isinstance(text, str)]
    return all(text.encode().decode() == text and clean(text) == text for text in texts)


@pytest.mark.parametrize("redirects", [0, 3])
@pytest.mark.parametrize(("answer", "error"), ODD_ANSWERS.values(), ids=ODD_ANSWERS.keys())
async def test_an_answer_of_odd_bytes_has_the_class_of_its_status(
    caller: Caller, answer: bytes, error: str | None, redirects: int
) -> None:
    async with answering(answer) as url:
        end = await caller.call(url, redirects=redirects)
    assert error_of(end)[1] == error
    assert can_be_stored(end)


async def test_a_worker_survives_every_odd_answer() -> None:
    async with started(slots=2, heartbeat=0.2, settings={"http_private": True}) as (gateway, process):
        for answer, error in ODD_ANSWERS.values():
            async with answering(answer) as url:
                end = await gateway.end_of(gateway.submit({"kind": "http", "url": url, "redirects": 3}))
            assert error_of(end)[1] == error
        assert process.returncode is None and len(gateway.registered) == 1


async def test_the_bytes_of_a_redirect_are_shown_in_the_message(caller: Caller) -> None:
    async with answering(ODD_ANSWERS["redirect path"][0]) as url:
        end = await caller.call(url)
    assert end.error is not None and r"http://x/\xff\xfe" in end.error.message
