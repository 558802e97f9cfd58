"""The SDK: `core` and `calls` say what to send and what an answer means, without I/O; `sync` and `aio` carry it.

Names load on first use: the worker needs `client.app` without httpx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tocsin.client.aio import AsyncClient
    from tocsin.client.core import ApiError, Page, Retries, Unreachable
    from tocsin.client.credentials import Credentials
    from tocsin.client.stream import Event
    from tocsin.client.sync import Client

__all__ = ["ApiError", "AsyncClient", "Client", "Credentials", "Event", "Page", "Retries", "Unreachable"]

_HOMES = {
    "ApiError": "core",
    "Page": "core",
    "Retries": "core",
    "Unreachable": "core",
    "Credentials": "credentials",
    "Event": "stream",
    "Client": "sync",
    "AsyncClient": "aio",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
