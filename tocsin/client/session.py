"""What both transports tell httpx, and what they make of its errors."""

from __future__ import annotations

import httpx

from tocsin import __version__
from tocsin.client.core import Retries, Unreachable
from tocsin.client.credentials import Credentials

DEFAULT_TIMEOUT = 30.0
DEFAULT_RETRIES = Retries()


def headers(credentials: Credentials, tenant: str | None) -> dict[str, str]:
    """The headers of every request."""
    common = {"Authorization": f"Bearer {credentials.key}", "User-Agent": f"tocsin-python/{__version__}"}
    return common | ({"Tocsin-Tenant": tenant} if tenant else {})


def timeouts(seconds: float) -> httpx.Timeout:
    """Patience for an answer, but little for a connection: nobody listens, or somebody does at once."""
    return httpx.Timeout(seconds, connect=min(seconds, 5.0))


def unreachable(url: str, error: httpx.RequestError) -> Unreachable:
    """An httpx error in our words."""
    if isinstance(error, httpx.TimeoutException):
        return Unreachable(f"{url} did not answer in time ({type(error).__name__})")
    return Unreachable(f"cannot reach {url}: {error or type(error).__name__}")
