"""Debian's haproxy and nginx as child processes in front of a server, each with connections that callers share."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tests import PATIENCE
from tests.ports import free_port

# The proxy disconnects a caller that sends half a request after a second, so that each case ends.
_HAPROXY = """
global
    maxconn 200
defaults
    mode http
    timeout connect 5s
    timeout client 1s
    timeout http-request 1s
    timeout http-keep-alive 1s
    timeout server 10s
    timeout queue 45s
    retries 0
    option forwardfor
    {leniency}
frontend callers
    bind 127.0.0.1:{port}
    http-request set-header x-front %[uuid()]
    default_backend servers
backend servers
    http-reuse always
    server one 127.0.0.1:{server} maxconn 4
"""
_LENIENT_FRONT = "option accept-invalid-http-request"
_NGINX = """
daemon off;
master_process off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 200; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_header_timeout 1s;
    client_body_timeout 1s;
    keepalive_timeout 1s;
    client_max_body_size 0;
    underscores_in_headers on;
    ignore_invalid_headers off;
    large_client_header_buffers 4 32k;
    upstream servers {{
        server 127.0.0.1:{server};
        keepalive 1;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://servers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_set_header X-Front $request_id;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_request_buffering {buffering};
            proxy_buffering {buffering};
            proxy_next_upstream off;
        }}
    }}
}}
"""


@dataclass(frozen=True)
class ProxyKind:
    """A proxy program and its configuration."""

    name: str
    program: str
    text: str
    words: tuple[str, ...]
    options: tuple[tuple[str, str], ...]

    @property
    def path(self) -> str | None:
        """Return the path of the program. Debian installs it outside of the PATH of ordinary users."""
        return shutil.which(self.program) or shutil.which(self.program, path="/usr/sbin")


def _haproxy(name: str, leniency: str) -> ProxyKind:
    return ProxyKind(name, "haproxy", _HAPROXY, ("-db", "-f"), (("leniency", leniency),))


def _nginx(name: str, buffering: str) -> ProxyKind:
    return ProxyKind(name, "nginx", _NGINX, ("-c",), (("buffering", buffering),))


KINDS = [
    _haproxy("haproxy", ""),
    _haproxy("haproxy-lenient", _LENIENT_FRONT),
    _nginx("nginx", "on"),
    _nginx("nginx-unbuffered", "off"),
]


@contextlib.asynccontextmanager
async def running(kind: ProxyKind, server: int, folder: Path) -> AsyncIterator[int]:
    """Run a proxy in front of the server on a port. Yield the port of the proxy."""
    port = free_port()
    config = folder / f"{kind.name}.conf"
    config.write_text(kind.text.format(port=port, server=server, folder=folder, **dict(kind.options)))
    assert kind.path is not None
    proxy = await asyncio.create_subprocess_exec(kind.path, *kind.words, str(config))
    try:
        async with asyncio.timeout(PATIENCE):
            while not await _listens(port):
                assert proxy.returncode is None, f"{kind.name} does not start"
                await asyncio.sleep(0.02)
        yield port
        assert proxy.returncode is None, f"{kind.name} has ended"
    finally:
        if proxy.returncode is None:
            proxy.kill()
        await proxy.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    return True
