"""Where the server is and who we are: given, else from the environment, else what `tocsin up` left in its home."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tocsin.errors import SetupError
from tocsin.settings import default_home

if TYPE_CHECKING:
    import ssl

Purpose = Literal["client", "worker"]

# For each purpose: the environment's names for its key, best first, and the file's.
_KEY_NAMES: dict[Purpose, tuple[tuple[str, ...], str]] = {
    "client": (("TOCSIN_KEY",), "key"),
    "worker": (("TOCSIN_WORKER_KEY", "TOCSIN_KEY"), "worker_key"),
}


@dataclass(frozen=True, slots=True)
class Credentials:
    """A server's URL and a key for it. `ca`: a file with the authorities to trust instead of the system's."""

    url: str
    key: str = field(repr=False)
    ca: str = ""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise SetupError(f"the server's URL must begin with http:// or https://, not {self.url[:40]!r}")
        if not self.key or not all("!" <= letter <= "~" for letter in self.key):
            raise SetupError("the key is empty or holds characters that no key has; was it copied whole?")

    def trust(self) -> ssl.SSLContext:
        """Whom to trust there."""
        return trust(self.url, self.ca)


def find(
    url: str | None = None,
    key: str | None = None,
    *,
    purpose: Purpose = "client",
    environ: Mapping[str, str] | None = None,
) -> Credentials:
    """Credentials from what is given, `TOCSIN_URL` and `TOCSIN_KEY`, or `credentials.toml`, in this order; whom to
    trust from `TOCSIN_CA`, or the file."""
    environ = os.environ if environ is None else environ
    names, name_in_file = _KEY_NAMES[purpose]
    url = url or environ.get("TOCSIN_URL")
    key = key or next((environ[name] for name in names if environ.get(name)), None)
    ca = environ.get("TOCSIN_CA", "")
    if url and key:
        return Credentials(url.rstrip("/"), key, ca)
    path = _file(environ)
    stored = _read(path)
    found_url = url or stored.get("url")
    # A key of one server is never sent to another.
    same_server = found_url is not None and found_url.rstrip("/") == stored.get("url", "").rstrip("/")
    found_key = key or (stored.get(name_in_file) if same_server else None)
    if not found_url:
        raise SetupError(f"no server is known: set TOCSIN_URL and {names[0]}, or run `tocsin up` (looked in {path})")
    if not found_key:
        raise SetupError(f"no key is known for {found_url}: set {names[0]} (looked in {path})")
    return Credentials(found_url.rstrip("/"), found_key, ca or (stored.get("ca", "") if same_server else ""))


def trust(url: str, ca: str) -> ssl.SSLContext:
    """Whom to trust: the authorities in the file `ca`, else the system's. Plain HTTP gets a context that trusts nobody:
    reading the authorities outlasts a call."""
    import ssl

    if not url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise SetupError(f"the authorities in TOCSIN_CA ({ca}) cannot be read: {error}") from None


def find_editor(environ: Mapping[str, str] | None = None) -> Credentials | None:
    """Credentials for making the jobs that a worker's module declares, if there are any besides the worker's own."""
    with contextlib.suppress(SetupError):
        return find(environ=environ)
    return None


def _file(environ: Mapping[str, str]) -> Path:
    home = environ.get("TOCSIN_HOME")
    return (Path(home).expanduser() if home else default_home()) / "credentials.toml"


def _read(path: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}") from None
    return {name: value for name, value in found.items() if isinstance(value, str)}
