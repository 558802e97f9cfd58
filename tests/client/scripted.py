"""A small HTTP server on loopback that answers what a test has written down, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Tocsin = Callable[..., Any]  # a command line to its result


@dataclass(frozen=True)
class Asked:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    """A reply to give. `hang_up`: read the request, then close the connection without a word."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    hang_up: bool = False


def problem(status: int, code: str, detail: str = "no", **more: Any) -> Reply:
    """A refusal as the API writes it."""
    headers = {"Content-Type": "application/problem+json"} | more.pop("headers", {})
    document = {"type": f"urn:tocsin:error:{code}", "title": code, "status": status, "detail": detail, "code": code}
    return Reply(status, document | more, headers)


class Script:
    """Replies by (method, path): a list is used up one by one, its last reply stays."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Asked] = []
        self._replies: dict[tuple[str, str], list[Reply]] = {}

    def on(self, method: str, path: str, *replies: Reply | dict[str, Any]) -> Script:
        self._replies[method, path] = [r if isinstance(r, Reply) else Reply(body=r) for r in replies]
        return self

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        replies = self._replies.get((asked.method, asked.path))
        if not replies:
            return problem(404, "not_found", f"no {asked.method} {asked.path} in the script")
        return replies.pop(0) if len(replies) > 1 else replies[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet per reply: two would wait for a delayed acknowledgement
    script: Script

    def _handle(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = json.loads(content) if content else None
        reply = self.script.answer(Asked(self.command, url.path, dict(parse_qsl(url.query)), headers, body))
        if reply.hang_up:
            self.close_connection = True
            return
        out = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in ({"Content-Type": "application/json"} | reply.headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Stage:
    """A server on which one script after the other is played."""

    def __init__(self) -> None:
        self._handler = type("Handler", (_Handler,), {})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def new_script(self) -> Script:
        self._handler.script = script = Script(f"http://127.0.0.1:{self._server.server_port}")
        return script

    def __enter__(self) -> Stage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
