"""Killing a worker's containers from beside it, with the standard library alone: the guard does it when the worker
cannot. Containers are no descendants of ours, so no mark of `proctree` finds them; their label does."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.parse

LABEL = "tocsin.owner"

_PATIENCE = 2.0  # seconds for one answer of the engine
_REST = 0.5  # seconds after a look that found nothing


class Strays:
    """The containers that run by the engine at a socket (empty: there is none) and have this owner."""

    def __init__(self, engine: str, owner: str) -> None:
        self._socket, self._owner = engine.removeprefix("unix://"), owner
        self._rest_until = 0.0

    def kill_once(self) -> int:
        """Kill what runs; how many that were."""
        if not self._socket or time.monotonic() < self._rest_until:
            return 0
        try:
            found = self._running()
            for container in found:
                self._ask("POST", f"/containers/{container}/kill")
        except (OSError, http.client.HTTPException, ValueError):
            found = []
        if not found:
            self._rest_until = time.monotonic() + _REST
        return len(found)

    def _running(self) -> list[str]:
        filters = json.dumps({"label": [f"{LABEL}={self._owner}"]})
        listed = json.loads(self._ask("GET", f"/containers/json?filters={urllib.parse.quote(filters)}"))
        return [container["Id"] for container in listed]

    def _ask(self, method: str, path: str) -> bytes:
        connection = _Connection(self._socket)
        try:
            connection.request(method, path)
            return connection.getresponse().read()
        finally:
            connection.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_PATIENCE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
