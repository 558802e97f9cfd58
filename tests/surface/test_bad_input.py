"""PROMISES.md section 3, row by row: a stable code, a problem document, nothing stored, no 5xx.

Cron has its own tests in `tests/model`, authentication in `tests/node`, the worker protocol in `tests/node` too.
"""

from __future__ import annotations

import json
import time
from typing import Any

from tests.conftest import Api
from tests.flow.kit import Scene

TARGET = '"target": {"kind": "process", "command": ["true"]}'
JSON = {"content-type": "application/json"}
NOWHERE = "019a0000-0000-7000-8000-000000000000"
DEEP = "[" * 70 + "]" * 70


def job(**fields: Any) -> bytes:
    """A good job but for `fields`."""
    return json.dumps({"target": {"kind": "process", "command": ["true"]}} | fields).encode()


def raw(text: str) -> bytes:
    """A good job with more JSON text behind it."""
    return f"{{{TARGET}, {text}}}".encode("utf-8", "surrogatepass")


def at(**schedule: Any) -> bytes:
    return job(schedule=schedule)


def env(**names: Any) -> bytes:
    return job(target={"kind": "process", "command": ["true"], "env": names})


def http(url: str = "http://x.example/", **fields: Any) -> bytes:
    return job(target={"kind": "http", "url": url} | fields)


# (row of section 3, body of POST /v1/jobs, status, code)
BODIES: list[tuple[str, bytes, int, str]] = [
    ("5 invalid UTF-8 in a value", raw('"description": "')[:-1] + b'\xff"}', 400, "malformed_json"),
    ("5 invalid UTF-8 in an unknown key", b'{"\xff": 1}', 400, "malformed_json"),
    ("5 a surrogate in UTF-8", raw('"description": "\ud800"'), 400, "malformed_json"),
    ("5 a byte order mark", b"\xef\xbb\xbf" + job(), 400, "malformed_json"),
    ("6 empty", b"", 400, "malformed_json"),
    ("6 blank", b" \n", 400, "malformed_json"),
    ("6 null", b"null", 400, "malformed_json"),
    ("6 array", b"[]", 400, "malformed_json"),
    ("6 string", b'"job"', 400, "malformed_json"),
    ("6 number", b"5", 400, "malformed_json"),
    ("6 cut short", job()[:-1], 400, "malformed_json"),
    ("6 more behind it", job() + b"{}", 400, "malformed_json"),
    ("12 NaN", raw('"priority": NaN'), 400, "malformed_json"),
    ("12 Infinity", raw('"resources": {"cpu": Infinity}'), 400, "malformed_json"),
    ("12 1e400", raw('"resources": {"cpu": 1e400}'), 422, "invalid_input"),
    ("12 1e400 in free JSON", raw('"depends_on": [1e400]'), 422, "invalid_input"),
    ("13 a key twice", raw('"priority": 1, "priority": 2'), 400, "duplicate_key"),
    ("13 a key twice, deep", raw('"placement": {"require": {"a": "1", "a": "1"}}'), 400, "duplicate_key"),
    ("13 a key twice, once in escapes", raw('"tags": {"a": "1", "\\u0061": "1"}'), 400, "duplicate_key"),
    (
        "13 a key twice, hidden by a quote",
        raw('"tags": {"a": "1", "a": "1"}, "name": "\\u0022\\u0022\\u0022"'),
        400,
        "duplicate_key",
    ),
    ("14 depth", raw(f'"depends_on": {DEEP}'), 400, "too_deep"),
    ("14 depth in an unknown field", raw(f'"x": {DEEP}'), 400, "too_deep"),
    ("14 depth without end", raw('"x": ' + "[" * 100_000), 400, "malformed_json"),
    ("14 depth without end, objects", raw('"x": ' + '{"a":' * 100_000), 400, "malformed_json"),
    ("14 many parts", raw('"x": [' + "[]," * 300_000 + "1]"), 400, "too_many_parts"),
    ("15 5,000 digits", raw('"priority": ' + "1" * 5000), 422, "invalid_input"),
    ("15 5,000 digits in free JSON", raw('"depends_on": [' + "1" * 5000 + "]"), 422, "invalid_input"),
    ("15 beyond 64 bits", http(body={"n": 2**64}), 422, "integer_out_of_range"),
    ("15 below 64 bits", http(body={"n": [-(2**63) - 1]}), 422, "integer_out_of_range"),
    ("16 NUL in a value", raw('"description": "a\\u0000"'), 422, "nul_character"),
    ("16 NUL in a key", raw('"tags": {"a\\u0000": "b"}'), 422, "nul_character"),
    ("16 NUL in free JSON", raw('"secrets": {"A": "\\u0000"}'), 422, "nul_character"),
    ("16 NUL behind a backslash", raw('"description": "\\\\\\u0000"'), 422, "nul_character"),
    ("16 NUL as it is", raw('"description": "a\0"'), 400, "malformed_json"),
    ("17 a lone high surrogate", raw('"description": "\\ud800"'), 400, "malformed_json"),
    ("17 a lone low surrogate", raw('"tags": {"\\udc00": "a"}'), 400, "malformed_json"),
    ("18 unknown field", job(prioritty=5), 422, "invalid_input"),
    ("18 unknown field, deep", at(cron="0 9 * * *", tz="UTC"), 422, "invalid_input"),
    ("18 another tenant's name", job(tenant="acme"), 422, "invalid_input"),
    ("19 5.0", raw('"priority": 5.0'), 422, "invalid_input"),
    ("19 1e2", raw('"priority": 1e2'), 422, "invalid_input"),
    ("19 true", job(priority=True), 422, "invalid_input"),
    ('19 "5"', job(priority="5"), 422, "invalid_input"),
    ("19 null", job(priority=None), 422, "invalid_input"),
    ("20 a long key", job(**{"k" * 100_000: 1}), 422, "invalid_input"),
    ("22 priority -1", job(priority=-1), 422, "invalid_input"),
    ("22 priority 1001", job(priority=1001), 422, "invalid_input"),
    ("22 priority 2^63", job(priority=2**63), 422, "invalid_input"),
    ("23 name empty", job(name=""), 422, "invalid_input"),
    ("23 name too long", job(name="n" * 129), 422, "invalid_input"),
    ("23 name with a line break", job(name="a\n"), 422, "invalid_input"),
    ("23 name with a control character", job(name="a\x1b[31m"), 422, "invalid_input"),
    ("23 name with bidi", job(name="a\u202eb"), 422, "invalid_input"),
    ("23 name with zero width", job(name="a\u200bb"), 422, "invalid_input"),
    ("23 name with a twin", job(name="\u0430dmin"), 422, "invalid_input"),
    ("24 51 tags", job(tags={f"t{i}": "" for i in range(51)}), 422, "invalid_input"),
    ("24 tag of 10 KB", job(tags={"a": "b" * 10_240}), 422, "invalid_input"),
    ("24 tag with bidi", job(tags={"a": "b\u202e"}), 422, "invalid_input"),
    ("24 tag's name", job(tags={"a b": "c"}), 422, "invalid_input"),
    ("25 description too long", job(description="d" * 4097), 422, "invalid_input"),
    ("26 max_attempts 0", job(retry={"max_attempts": 0}), 422, "invalid_input"),
    ("26 max_attempts -1", job(retry={"max_attempts": -1}), 422, "invalid_input"),
    ("26 max_attempts 10^9", job(retry={"max_attempts": 10**9}), 422, "invalid_input"),
    ("27 negative delay", job(retry={"delay": "-PT1S"}), 422, "invalid_input"),
    ("27 delay as a number", job(retry={"delay": 5}), 422, "invalid_input"),
    ("27 multiplier 0", job(retry={"multiplier": 0}), 422, "invalid_input"),
    ("27 max_delay of 100 years", job(retry={"max_delay": "P36500D"}), 422, "invalid_input"),
    ("28 timeout 0", job(timeout="PT0S"), 422, "invalid_input"),
    ("28 timeout negative", job(timeout="-5m"), 422, "invalid_input"),
    ("28 timeout too long", job(timeout="P8D"), 422, "invalid_input"),
    ("28 timeout in Arabic digits", job(timeout="PT٥M"), 422, "invalid_input"),
    ("29 cpu negative", job(resources={"cpu": -1}), 422, "invalid_input"),
    ("29 memory negative", job(resources={"memory_mb": -1}), 422, "invalid_input"),
    ("30 a pool that is no name", job(pool="a b"), 422, "invalid_input"),
    ("30 the pool of workflow runs", job(pool="workflows"), 422, "invalid_input"),
    ("31 a target URL of a file", http("file:///etc/passwd"), 422, "invalid_input"),
    ("31 a target URL with a password", http("http://user:pw@x.example/"), 422, "invalid_input"),
    ("31 a target URL with a line end", http("http://x.example/\r\nEvil: 1"), 422, "invalid_input"),
    ("31 a target URL whose host is a template", http("http://{args.host}/"), 422, "invalid_input"),
    ("31 a header that cuts the request", http(headers={"X": "a\r\n\r\nGET / HTTP/1.1"}), 422, "invalid_input"),
    ("31 a header that frames the request", http(headers={"Transfer-Encoding": "chunked"}), 422, "invalid_input"),
    ("31 a status that is none", http(expect_status=["2yy"]), 422, "invalid_input"),
    ("31 a secret that the job does not have", http(sign_with="KEY"), 422, "invalid_input"),
    ("31 an unknown target", job(target={"kind": "ftp"}), 422, "invalid_input"),
    ("32 env name with =", env(**{"A=B": "c"}), 422, "invalid_input"),
    ("32 LD_PRELOAD", env(LD_PRELOAD="/x.so"), 422, "invalid_input"),
    ("32 PATH", env(PATH="/tmp"), 422, "invalid_input"),
    ("32 env value of a number", env(A=5), 422, "invalid_input"),
    ("33 command as a string", job(target={"kind": "process", "command": "rm -rf /"}), 422, "invalid_input"),
    ("33 command empty", job(target={"kind": "process", "command": []}), 422, "invalid_input"),
    ("34 no offset", at(at="2027-01-01T00:00:00"), 422, "invalid_input"),
    ("35 second 60", at(at="2027-01-01T00:00:60Z"), 422, "invalid_input"),
    ("35 hour 24", at(at="2027-01-01T24:00:00Z"), 422, "invalid_input"),
    ("35 week date", at(at="2027-W01-1"), 422, "invalid_input"),
    ("35 a number", at(at=1_800_000_000), 422, "invalid_input"),
    ("36 year 0", at(at="0000-01-01T00:00:00Z"), 422, "invalid_input"),
    ("36 year 9999", at(at="9999-12-31T23:59:59-23:59"), 422, "invalid_input"),
    ("36 year 10000", at(at="10000-01-01T00:00:00Z"), 422, "invalid_input"),
    ("36 infinity", at(at="infinity"), 422, "invalid_input"),
    ("37 ten years ago", at(at="2016-01-01T00:00:00Z"), 422, "in_the_past"),
    *(
        (f"38 zone {zone[:24]}", at(cron="0 9 * * *", timezone=zone), 422, "")
        for zone in ("America", "../../etc/passwd", "z" * 5000, "localtime", "posixrules", "right/UTC", "", "\u202e")
    ),
    ("40 two kinds", at(cron="0 9 * * *", every="PT5M"), 422, "invalid_input"),
    ("40 no kind", at(timezone="UTC"), 422, "invalid_input"),
]


async def stored(scene: Scene) -> list[int]:
    tables = ("jobs", "runs", "audit", "idempotency")
    names = {
        r["relname"]
        for r in await scene.rows("select relname from pg_class where relnamespace = 'tocsin'::regnamespace")
    }
    return [await scene.value(f"select count(*) from {table}") for table in tables if table in names]


def check(reply: Any, status: int | tuple[int, ...], code: str = "") -> None:
    assert reply.status_code in ((status,) if isinstance(status, int) else status), reply.text[:500]
    assert reply.headers["content-type"] == "application/problem+json"
    found = reply.json()
    assert {"type", "title", "status", "detail", "code"} <= found.keys() and found["status"] == reply.status_code
    assert len(reply.content) < 20_000 and "Traceback" not in reply.text
    if code:
        assert found["code"] == code, found


async def test_bodies(scene: Scene) -> None:
    before = await stored(scene)
    for row, body, status, code in BODIES:
        start = time.process_time()
        reply = await scene.api.http.post("/v1/jobs", content=body, headers=JSON | {"idempotency-key": "k"})
        spent = time.process_time() - start
        try:
            check(reply, status, code)
        except AssertionError as error:
            raise AssertionError(f"row {row}: {error}") from None
        assert spent < 5, f"row {row} took {spent:.3f} s"  # some milliseconds, unless our own rubbish is collected
        assert await stored(scene) == before, f"row {row} stored something"


async def test_what_is_odd_but_good_is_taken(scene: Scene) -> None:
    """20: such keys are stored as they are; and neither check may cry wolf."""
    args = {
        "__proto__": {"a": 1},
        "$ref": "#/x",
        "k" * 1000: 1,
        'quo"te': '":"',
        "\\u0000": "\\u0000",
        "n": [-(2**63), 2**64 - 1],
    }
    made = await scene.api.post("/v1/jobs", {"target": {"kind": "python", "function": "f", "kwargs": args}})
    assert made["target"]["kwargs"] == args
    nest: Any = []
    for _ in range(50):
        nest = [nest, "[[[" * 20]
    made = await scene.api.post("/v1/jobs", {"target": {"kind": "python", "function": "f", "args": nest}})
    assert made["target"]["args"] == nest
    good = b'{"target": {"kind": "process", "command": ["\\u0022", "a", "a"]}, "tags": {"a": "a", "b": "a"}}'
    reply = await scene.api.http.post("/v1/jobs", content=good, headers=JSON)
    assert reply.status_code == 201, reply.text


# (row, method, path, headers, content, statuses, code)
CALLS: list[tuple[str, str, str, dict[str, str], bytes | None, int | tuple[int, ...], str]] = [
    ("1 said to be too large", "POST", "/v1/jobs", JSON | {"content-length": str(9 << 20)}, b"{}", 413, "too_large"),
    ("1 too large", "POST", "/v1/jobs", JSON, b" " * (9 << 20), 413, "too_large"),
    ("1 endless digits", "POST", "/v1/jobs", JSON | {"content-length": "9" * 5000}, b"{}", 413, "too_large"),
    ("3 gzip", "POST", "/v1/jobs", JSON | {"content-encoding": "gzip"}, b"\x1f\x8b", 415, "unsupported_media_type"),
    ("4 XML", "POST", "/v1/jobs", {"content-type": "text/xml"}, job(), 415, "unsupported_media_type"),
    ("4 a form", "POST", "/v1/jobs", {"content-type": "application/x-www-form-urlencoded"}, b"a=b", 415, ""),
    ("9 unknown path", "GET", "/v1/nothing", {}, None, 404, "not_found"),
    ("9 a slash behind it", "GET", "/v1/jobs/", {}, None, 404, "not_found"),
    ("9 unknown method", "TRACE", "/v1/jobs", {}, None, 405, "method_not_allowed"),
    ("9 OPTIONS", "OPTIONS", "/v1/jobs", {}, None, 405, "method_not_allowed"),
    ("9 BREW", "BREW", "/v1/jobs", {}, None, 405, "method_not_allowed"),
    ("9 PUT of a list", "PUT", "/v1/jobs", JSON, b"{}", 405, "method_not_allowed"),
    ("11 dots", "GET", "/v1/jobs/%2e%2e", {}, None, 404, "not_found"),
    ("11 dots and slashes", "GET", "/v1/jobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd", {}, None, 404, "not_found"),
    ("11 NUL", "GET", "/v1/jobs/%00", {}, None, 404, "not_found"),
    ("11 NUL behind an id", "GET", f"/v1/jobs/{NOWHERE}%00", {}, None, 404, "not_found"),
    ("11 NUL in a slug", "GET", "/v1/tenants/a%00b", {}, None, 404, "not_found"),
    ("11 NUL in a slug that is changed", "POST", "/v1/tenants/%00/suspend", {}, b"{}", 404, "not_found"),
    ("11 NUL in a name", "GET", "/v1/jobs/by-name/%00", {}, None, 404, "not_found"),
    ("11 no UTF-8", "GET", "/v1/jobs/%ff%fe", {}, None, 404, "not_found"),
    ("11 10 KB", "GET", "/v1/jobs/" + "a" * 10_240, {}, None, 404, "not_found"),
    ("11 braces", "GET", "/v1/jobs/{019a0000-0000-7000-8000-00000000000}", {}, None, 404, "not_found"),
    ("58 key empty", "POST", "/v1/jobs", JSON | {"idempotency-key": ""}, job(), 422, "idempotency_key"),
    ("58 key of 10 KB", "POST", "/v1/jobs", JSON | {"idempotency-key": "k" * 10_240}, job(), 422, "idempotency_key"),
    ("23 key's name with bidi", "POST", "/v1/keys", JSON, '{"role":"viewer","name":"a\u202e"}'.encode(), 422, ""),
    ("23 key's name with a line break", "POST", "/v1/keys", JSON, b'{"role":"viewer","name":"a\\n"}', 422, ""),
    ("23 tenant's name", "POST", "/v1/tenants", JSON, b'{"slug":"a\\n"}', 422, "invalid_input"),
    ("55 If-Match", "POST", f"/v1/jobs/{NOWHERE}/pause", {"if-match": '"x"'}, None, 412, "precondition_failed"),
    ("59 limit 0", "GET", "/v1/jobs?limit=0", {}, None, 400, "invalid_limit"),
    ("59 limit -1", "GET", "/v1/jobs?limit=-1", {}, None, 400, "invalid_limit"),
    ("59 limit 10^9", "GET", "/v1/jobs?limit=1000000000", {}, None, 400, "invalid_limit"),
    ("59 limit in Arabic", "GET", "/v1/jobs?limit=%D9%A5", {}, None, 400, "invalid_limit"),
    ("59 forged cursor", "GET", "/v1/jobs?cursor=AAAA", {}, None, 400, "invalid_cursor"),
    ("60 unknown parameter", "GET", "/v1/jobs?sort=name", {}, None, 400, "unknown_parameter"),
    ("60 unknown parameter of a read", "GET", f"/v1/jobs/{NOWHERE}?x=1", {}, None, 400, "unknown_parameter"),
    ("60 unknown parameter of a write", "POST", "/v1/jobs?x=1", JSON, job(), 400, "unknown_parameter"),
    ("60 a parameter twice", "GET", "/v1/jobs?q=a&q=b", {}, None, 400, "duplicate_parameter"),
    ("60 NUL in a filter", "GET", "/v1/jobs?q=%00", {}, None, 400, "nul_character"),
    ("60 a filter of 10 KB", "GET", "/v1/jobs?q=" + "a" * 10_240, {}, None, 400, "long_parameter"),
    ("60 a tag without a colon", "GET", "/v1/jobs?tag=a", {}, None, 400, "invalid_tag"),
    ("60 no time", "GET", "/v1/runs?from=yesterday", {}, None, 400, "invalid_time"),
    ("60 no id", "GET", "/v1/runs?job=1%20or%201=1", {}, None, 400, "invalid_id"),
    ("60 no number", "GET", f"/v1/runs/{NOWHERE}/logs?after=x", {}, None, (400, 404), ""),
    ("30 a tenant that is none", "GET", "/v1/jobs", {"tocsin-tenant": "a' or 1=1"}, None, 404, "not_found"),
    ("64 key in the URL", "GET", "/v1/jobs?key=abc", {}, None, 400, "key_in_url"),
]


async def test_calls(scene: Scene) -> None:
    before = await stored(scene)
    for row, method, path, headers, content, status, code in CALLS:
        reply = await scene.api.http.request(method, path, headers=headers, content=content)
        try:
            check(reply, status, code)
        except AssertionError as error:
            raise AssertionError(f"row {row}: {error}") from None
        assert await stored(scene) == before, f"row {row} stored something"


async def test_405_names_every_method(still_api: Api) -> None:
    reply = await still_api.http.request("PUT", f"/v1/jobs/{NOWHERE}")
    assert reply.status_code == 405
    assert {"GET", "HEAD", "DELETE"} <= set(reply.headers["allow"].replace(" ", "").split(","))
    reply = await still_api.http.patch("/v1/jobs/batch", json={})
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert (await still_api.http.head("/v1/jobs")).status_code == 200


async def test_sql_in_a_filter_finds_nothing(scene: Scene) -> None:
    await scene.api.http.post("/v1/jobs", content=job(name="here"), headers=JSON)
    for text in ("' or '1'='1", "%", "_", "\\", "here'--", "\ufffd"):
        for name in ("q", "pool", "tag"):
            value = f"{text}:{text}" if name == "tag" else text
            found = await scene.api.get("/v1/jobs", params={name: value})
            assert found["items"] == [], (name, text)
        await scene.api.get("/v1/jobs", params={"state": text}, expect=422)


async def test_the_same_name_twice_is_a_conflict(scene: Scene) -> None:
    first = await scene.api.http.post("/v1/jobs", content=job(name="twin", schedule={"manual": True}), headers=JSON)
    assert first.status_code == 201
    before = await stored(scene)
    check(
        await scene.api.http.post("/v1/jobs", content=job(name="twin", schedule={"manual": True}), headers=JSON),
        409,
        "name_taken",
    )
    assert await stored(scene) == before


async def test_a_batch_of_costly_schedules_is_cut_short(still_api: Api) -> None:
    """Each of them is checked in bounded time; a thousand of them would still keep everybody else waiting."""
    rules = [f"FREQ=DAILY;COUNT=10000;BYMINUTE={i % 60};BYHOUR={i // 60}" for i in range(1000)]
    jobs = [{"target": {"kind": "process", "command": ["true"]}, "schedule": {"rrule": rule}} for rule in rules]
    check(await still_api.http.post("/v1/jobs/batch", json={"jobs": jobs}), 413, "too_large")
    assert (await still_api.get("/v1/jobs"))["items"] == []
