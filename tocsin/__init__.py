"""Tocsin: cron as a service, a durable distributed job scheduler on PostgreSQL.

The public names load on first use, so that `import tocsin` costs next to nothing in a job's process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tocsin import errors
    from tocsin.client.aio import AsyncClient
    from tocsin.client.app import App
    from tocsin.client.context import Context
    from tocsin.client.failures import GiveUp, Retry
    from tocsin.client.sync import Client

__version__ = "0.1.0"
__all__ = ["App", "AsyncClient", "Client", "Context", "GiveUp", "Retry", "__version__", "errors"]

_HOMES = {
    "App": "tocsin.client.app",
    "Context": "tocsin.client.context",
    "GiveUp": "tocsin.client.failures",
    "Retry": "tocsin.client.failures",
    "Client": "tocsin.client.sync",
    "AsyncClient": "tocsin.client.aio",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("tocsin.errors")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
