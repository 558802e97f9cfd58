"""Random messages on one connection, split at random points, against a model of the allowed answers.

`make test` tries some hundred examples of each property; `make fuzz MINUTES=10` a thousand for each minute.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.http_wire import Answer, MemoryWire
from tocsin.errors import ApiProblem
from tocsin.node.server.protocol import Reply, Request

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
EXAMPLES = int(MINUTES * 1_000) or 200
# Each message has its own letter in every part, so that a part in another message is noticed. No change below can turn
# one letter into another.
LETTERS = "ghijkl"
MARK = re.compile(rf"<([{LETTERS}])>")
ERRORS_OF_CONNECTIONS = (400, 413, 431)


class Handled(NamedTuple):
    """A request that reached the handler, and its body."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[str, str], ...]
    body: bytes | str


@dataclass
class Outcome:
    """The result of one connection: requests in the order they were handled, and all answers."""

    handled: list[Handled]
    answers: list[Answer]

    @property
    def story(self) -> tuple[list[Handled], list[tuple[int, bytes]]]:
        """Return the facts that must not depend on how the bytes were split."""
        return self.handled, [(answer.status, answer.body) for answer in self.answers]


def run(pieces: list[bytes], turns: list[bool]) -> Outcome:
    """Deliver pieces to a new connection; `turns`: after which pieces the event loop gets a turn."""
    return asyncio.run(_run(pieces, turns))


async def _run(pieces: list[bytes], turns: list[bool]) -> Outcome:
    handled: list[Handled] = []

    async def handler(request: Request) -> Reply:
        headers = tuple(sorted(request.headers.items()))
        body: bytes | str
        try:
            body = await request.body(100_000)
        except ApiProblem as error:
            body = str(error)
            raise
        finally:
            handled.append(Handled(request.method, request.path, request.query_string, headers, body))
        return Reply(b"%d" % len(handled))

    wire = MemoryWire(handler)
    for number, piece in enumerate(pieces):
        if wire.transport.closed:
            break
        if wire.transport.paused or turns[number % len(turns)]:
            await wire.settle()
        if not wire.transport.closed:
            assert not wire.transport.paused, "the server never reads on"
            wire.connection.data_received(piece)
    while True:
        before = len(wire.transport.written)
        await wire.settle()
        if len(wire.transport.written) == before:
            break
    found = Outcome(handled.copy(), wire.answers)  # without a request whose body never arrived
    wire.hang_up()
    await wire.settle()
    return found


def split(data: bytes, points: list[int]) -> list[bytes]:
    """Cut at these points, taken modulo the length."""
    cuts = sorted({point % (len(data) + 1) for point in points} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(cuts)]


# ── messages whose answers are known ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Message:
    """The bytes of a message, what the handler must see, and the answer; None: never handled."""

    data: bytes
    seen: Handled | None
    status: int
    last: bool = False


TOKENS = st.sampled_from(["accept", "x-a", "x-b", "x-forwarded-for", "user-agent"])
VALUES = st.text('abc ,;="\xe9\t', max_size=12).map(lambda text: text.strip(" \t"))
FIELDS = st.lists(st.tuples(TOKENS, VALUES), max_size=6)
BODIES = st.binary(max_size=40)
SPLITS = st.lists(st.integers(0, 4_000), max_size=30)
TURNS = st.lists(st.booleans(), min_size=1, max_size=8)
FAULTS = (
    b"no colon here",
    b"x-a : b",
    b" folded: line",
    b"x-a: b\nx-b: c",
    b"x-a: \0",
    b"host: again",
    b"content-length: 1\r\ncontent-length: 1",
    b"content-length: 1\r\ntransfer-encoding: chunked",
    b"transfer-encoding: gzip, chunked",
    b"authorization: a\r\nauthorization: b",
    b"tocsin-tenant: a\r\nTocsin-Tenant: a",
)


@st.composite
def chunked(draw: st.DrawFn, body: bytes) -> bytes:
    """Return a body in chunks of random sizes, some with extensions."""
    parts = split(body, draw(st.lists(st.integers(0, 100), max_size=4))) if body else []
    extensions = st.sampled_from([b"", b";a", b";a=b;c"])
    lines = [b"%x%b\r\n%b\r\n" % (len(part), draw(extensions), part) for part in parts if part]
    return b"".join(lines) + b"0%b\r\n" % draw(extensions)


@st.composite
def messages(draw: st.DrawFn, letter: str) -> Message:
    """Return one message: complete and valid, the last of its connection, or with one fault."""
    kind = draw(st.sampled_from(["plain"] * 8 + ["close", "1.0", "fault", "trailer", "chunk"]))
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]))
    body = draw(BODIES) if method not in ("GET", "HEAD") else b""
    path, query = f"/<{letter}>", draw(st.sampled_from([b"", b"a=b", b"a=%20&b"]))
    fields = [("host", "localhost"), ("x-mark", f"<{letter}>"), *draw(FIELDS)]
    in_chunks = kind in ("trailer", "chunk") or (kind != "1.0" and bool(body) and draw(st.booleans()))
    if in_chunks:
        fields.append(("transfer-encoding", "chunked"))
        framed = draw(chunked(body))
        if kind == "trailer":
            framed += b"tocsin-tenant: <%b>\r\n\r\n" % letter.encode()
        elif kind == "chunk":
            framed = b"zz\r\n" + framed
        else:
            framed += b"\r\n"
    else:
        framed = body
        if body or draw(st.booleans()):
            fields.append(("content-length", str(len(body))))
    if kind == "close":
        fields.append(("connection", "close"))
    lines = [f"{name.title() if draw(st.booleans()) else name}: {value}".encode("latin-1") for name, value in fields]
    if kind == "fault":
        lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(FAULTS)))
    version = b"1.0" if kind == "1.0" else b"1.1"
    target = path.encode() + (b"?" + query if query else b"")
    data = b"\r\n".join((b"%b %b HTTP/%b" % (method.encode(), target, version), *lines, b"", framed))
    if kind == "fault":
        return Message(data, None, 400, last=True)
    joined: dict[str, str] = {}
    for name, value in fields:
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    refused = kind in ("trailer", "chunk")
    seen = Handled(method, path, query, tuple(sorted(joined.items())), "refused" if refused else body)
    return Message(data, seen, 400 if refused else 200, last=kind in ("close", "1.0") or refused)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    return [draw(messages(letter)) for letter in LETTERS[: draw(st.integers(1, len(LETTERS)))]]


@settings(max_examples=EXAMPLES)
@given(conversations(), SPLITS, TURNS)
def test_each_message_is_answered_as_the_model_says(sent: list[Message], points: list[int], turns: list[bool]) -> None:
    expected: list[Message] = []
    for each in sent:
        expected.append(each)
        if each.last:
            break
    found = run(split(b"".join(each.data for each in sent), points), turns)
    assert [answer.status for answer in found.answers] == [each.status for each in expected]
    for each, handled in zip([e for e in expected if e.seen], found.handled, strict=True):
        assert each.seen is not None
        body = "refused" if isinstance(handled.body, str) else handled.body
        assert handled._replace(body=body) == each.seen
    assert ["connection" in answer.headers for answer in found.answers] == [each.last for each in expected]


# ── arbitrary bytes ──────────────────────────────────────────────────────────────────────────────────────────────


SCRAPS = st.sampled_from(
    [
        b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b";", b",", b"\0", b"\x0b", b"0", b"1", b"f", b"-", b"+",
        b"\xff",
        b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Content-Length: 0\r\n", b"Connection: close\r\n",
        b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"0\r\n\r\n", b"Host: evil\r\n",
        b"HTTP/1.0", b"HTTP/1.1", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"#", b"http://evil/", b"CONNECT ",
    ]
)  # fmt: skip
CHANGES = st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 6), SCRAPS), min_size=1, max_size=4)


@settings(max_examples=EXAMPLES)
@given(conversations(), CHANGES, SPLITS, TURNS)
def test_whatever_the_bytes_are_no_message_reaches_another(
    sent: list[Message], changes: list[tuple[int, int, bytes]], points: list[int], turns: list[bool]
) -> None:
    data = b"".join(each.data for each in sent)
    for place, length, scrap in changes:
        at = place % (len(data) + 1)
        data = data[:at] + scrap + data[at + length :]
    whole = run([data], [True])
    check_rules(whole)
    assert run(split(data, points), turns).story == whole.story, "the answers depend on how the bytes were split"


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=300), SPLITS, TURNS)
def test_random_bytes_are_refused_or_wait(data: bytes, points: list[int], turns: list[bool]) -> None:
    whole = run([data], [True])
    check_rules(whole)
    assert run(split(data, points), turns).story == whole.story


def check_rules(found: Outcome) -> None:
    """Raise if a connection broke a rule that holds for all bytes."""
    for answer in found.answers[:-1]:
        assert answer.status == 200 and "connection" not in answer.headers, "something followed the last answer"
    for answer in found.answers[-1:]:
        assert answer.status == 200 or (answer.status in ERRORS_OF_CONNECTIONS and "connection" in answer.headers)
    assert len(found.handled) <= len(found.answers) <= len(found.handled) + 1
    for handled in found.handled:
        text = handled.path + "".join(name + value for name, value in handled.headers)
        marks = set(MARK.findall(text))
        assert len(marks) <= 1, f"parts of several messages in one request: {handled}"
