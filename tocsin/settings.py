"""Settings: one frozen record, read once from the environment, every field with its meaning, unit and default.

A field `lease_seconds` is read from `TOCSIN_LEASE_SECONDS`. An unknown `TOCSIN_…` variable is refused with the
nearest name, because a misspelt setting that is silently ignored is found out at the worst time.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from tocsin.errors import SetupError

# Variables with our prefix that are not settings: the client's, and what a job's process is given.
_NOT_SETTINGS = {
    "TOCSIN_URL",
    "TOCSIN_KEY",
    "TOCSIN_WORKER_KEY",
    "TOCSIN_CA",
    "TOCSIN_RUN_ID",
    "TOCSIN_JOB_ID",
    "TOCSIN_JOB_NAME",
    "TOCSIN_ATTEMPT",
    "TOCSIN_FENCE",
    "TOCSIN_SCHEDULED_FOR",
    "TOCSIN_LOGICAL_AT",
    "TOCSIN_ARGS",
    "TOCSIN_ARGS_FILE",
    "TOCSIN_PARENTS",
    "TOCSIN_PARENTS_FILE",
    "TOCSIN_RUN_TOKEN",
}
# Shorter names of settings: an own one goes before.
_ALIASES = {"DATABASE_URL": "database_url", "TOCSIN_OBJECTS": "objects_url"}


def default_home() -> Path:
    """`~/.tocsin`; for root `/var/lib/tocsin`, because PostgreSQL runs as another user who must get there."""
    return Path("/var/lib/tocsin") if os.geteuid() == 0 else Path.home() / ".tocsin"


def _doc(text: str, default: Any) -> Any:
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True)
class Settings:
    """What an operator may turn. Durations are seconds."""

    home: Path = field(default_factory=default_home, metadata={"doc": "Folder of all data of `tocsin up`."})
    database_url: str = _doc("PostgreSQL ≥ 15 to use; empty: `tocsin up` runs its own. Also `DATABASE_URL`.", "")
    objects_url: str = _doc(
        "Where logs and old history live: `s3://bucket/prefix`, `gs://…`, `az://…`, with the credentials of their own "
        "environment; empty: the folder `objects` in the home. Also `TOCSIN_OBJECTS`.",
        "",
    )
    adopt_objects: str = _doc(
        "Marker of an object storage that was lost, or left on purpose, in whose place the one above comes; the server "
        "that refuses to start without it names it.",
        "",
    )
    hot_days: int = _doc(
        "Days that ended runs and records of the audit stay in PostgreSQL before they are archived to object storage, "
        "at least 2; 0: for ever.",
        30,
    )
    runs_days: int = _doc("Days that archived runs are kept, unless a tenant's own retention says otherwise.", 365)
    logs_days: int = _doc("Days that logs are kept, unless a tenant's own retention says otherwise.", 365)
    audit_days: int = _doc(
        "Days that archived records of the audit are kept, unless a tenant's own retention says otherwise.", 2557
    )
    iceberg: bool = _doc(
        "Write Iceberg metadata beside archived history, a table for each tenant, so that other engines read it.", False
    )
    master_key: str = field(
        default="",
        repr=False,
        metadata={
            "doc": "Keys that seal secrets, 32 bytes each in base64, separated by commas or spaces, or the path of a "
            "file with them; the first seals, all unseal. Empty: the file `secrets/master-keys` in the home, if there."
        },
    )
    unresponsive_seconds: float = _doc(
        "Seconds without an answer after which `tocsin up` ends its server and starts it again; 0: never.", 30.0
    )
    host: str = _doc("Address the API listens on.", "127.0.0.1")
    port: int = _doc("Port the API listens on.", 8470)
    insecure: bool = _doc("Allow listening beyond loopback without TLS.", False)
    tls_cert: str = _doc(
        "File with the certificate and its chain, in PEM; with it the API speaks HTTPS only; reread when it changes.",
        "",
    )
    tls_key: str = _doc("File with the certificate's private key, in PEM; empty: it stands in the same file.", "")
    public_url: str = _doc(
        "How callers reach the servers, as `https://tocsin.example.com`; empty: by the address they listen on.", ""
    )
    hosts: str = _doc(
        "Further names that the servers answer to, by commas, beside `localhost`, the name in `public_url`, and "
        "addresses; a request for any other is refused.",
        "",
    )
    cors_origins: str = _doc(
        "Origins whose pages may call the API from a browser, by commas, as `https://ops.example.com`; empty: none.", ""
    )
    proxies: str = _doc(
        "Addresses or networks of proxies in front of the servers, by commas: their `X-Forwarded-For` is believed.", ""
    )
    metrics_from: str = _doc(
        "Addresses or networks that read `/metrics` without a key, by commas; anybody else needs a platform key. "
        "Behind a proxy, name it in `proxies`, or all its callers have its address.",
        "127.0.0.0/8, ::1",
    )
    oidc: str = _doc(
        "Issuers of OpenID Connect whose tokens are believed: a file in TOML or JSON, or JSON itself; see "
        "docs/how-to/oidc.md. Empty: none.",
        "",
    )
    connections: int = _doc(
        "Connections that a server has at once; one address, unless a proxy's, may have a quarter of them.", 10_000
    )
    rate_per_key: float = _doc(
        "Requests a second that a server takes of one key, and twice as many at once; 0: any number. Workers are free.",
        5000.0,
    )
    rate_per_address: float = _doc(
        "Requests a second that a server takes from one address, and twice as many at once; 0: any number. Workers are "
        "free.",
        5000.0,
    )
    auth_failures_per_address: float = _doc(
        "Bad keys a second that a server takes from one address, and ten times as many at once, before it looks at no "
        "new key from there; 0: any number.",
        5.0,
    )
    lease_seconds: float = _doc("A worker silent for this long is lost and its runs are taken back.", 10.0)
    heartbeat_seconds: float = _doc("How often a worker reports at least.", 3.0)
    drain_seconds: float = _doc("How long a worker that is told to stop waits for what it runs.", 10.0)
    horizon_seconds: float = _doc("How far ahead occurrences are staged.", 10.0)
    ahead_seconds: float = _doc("How long before its instant a run may be handed to a free worker; 0: never.", 1.0)
    prefer_seconds: float = _doc("How long a run waits for a worker with the labels it prefers; 0: not at all.", 2.0)
    reserve_after_seconds: float = _doc(
        "How long a run waits for room on a worker before one is kept free of smaller runs for it.", 30.0
    )
    database_connections: int = _doc(
        "Connections per server for calls and loops, in each of two roles; workers have six of their own.", 8
    )
    http_private: bool = _doc(
        "Let http jobs on this worker reach private networks and this machine, of all tenants: for development.", False
    )
    container_engine: str = _doc(
        "Docker's or podman's socket for a worker's containers, as `unix:///run/docker.sock`; empty: it runs none.", ""
    )
    kubernetes: str = _doc(
        "Cluster for a worker's Kubernetes Jobs: a kubeconfig file, or `in-cluster`; empty: it runs none.", ""
    )
    kubernetes_namespaces: str = _doc("Namespaces that jobs may use, by commas; the first is the default.", "default")
    kubernetes_service_accounts: str = _doc("Service accounts that jobs may name, by commas.", "")
    log_level: str = _doc("debug, info, warning or error.", "info")
    log_json: bool = _doc("Log lines as JSON instead of for people.", False)
    failpoints: str = _doc("Faults to inject, for tests only; see tocsin/failpoints.py.", "")

    def __post_init__(self) -> None:
        # Below that, killing what runs in time, on a machine that is busy, would be luck.
        if not 2 <= self.lease_seconds < inf:
            raise SetupError(f"lease_seconds must be at least 2, not {self.lease_seconds:g}")
        if not 0 < self.heartbeat_seconds <= self.lease_seconds / 2:
            raise SetupError(
                f"heartbeat_seconds ({self.heartbeat_seconds:g}) must be positive and at most half of lease_seconds "
                f"({self.lease_seconds:g})"
            )
        if not 0 <= self.drain_seconds < inf:
            raise SetupError(f"drain_seconds must not be negative, but is {self.drain_seconds:g}")
        if not 0 <= self.ahead_seconds <= self.lease_seconds / 2:
            raise SetupError("ahead_seconds must be between 0 and half of lease_seconds")
        for name in ("prefer_seconds", "reserve_after_seconds"):
            if not 0 <= getattr(self, name) <= 86_400:
                raise SetupError(f"{name} must be between 0 and 86400, not {getattr(self, name):g}")
        if self.hot_days != 0 and not 2 <= self.hot_days <= 3650:
            raise SetupError(f"hot_days must be 0, or from 2 to 3650, not {self.hot_days}")
        for name in ("runs_days", "logs_days", "audit_days"):
            if not 1 <= getattr(self, name) <= 36_500:
                raise SetupError(f"{name} must be from 1 to 36500, not {getattr(self, name)}")
        if self.unresponsive_seconds != 0 and not 1 <= self.unresponsive_seconds <= 86_400:
            raise SetupError(f"unresponsive_seconds must be 0, or from 1 to 86400, not {self.unresponsive_seconds:g}")
        if not 0 < self.port < 65536:
            raise SetupError(f"port {self.port} is not between 1 and 65535")
        self._check_edge()

    def _check_edge(self) -> None:
        if self.tls_key and not self.tls_cert:
            raise SetupError("tls_key is the key of a certificate: give tls_cert, too")
        if self.connections < 10:
            raise SetupError(f"connections must be at least 10, not {self.connections}")
        for name in ("rate_per_key", "rate_per_address", "auth_failures_per_address"):
            if not 0 <= getattr(self, name) < inf:
                raise SetupError(f"{name} must not be negative, but is {getattr(self, name):g}")
        if self.public_url and not is_origin(self.public_url):
            raise SetupError(f"public_url is written as https://tocsin.example.com, not {self.public_url!r}")
        for origin in listed(self.cors_origins):
            if not is_origin(origin):
                raise SetupError(f"cors_origins are written as https://ops.example.com, not {origin!r}")
        for name in ("proxies", "metrics_from"):
            for network in listed(getattr(self, name)):
                try:
                    ipaddress.ip_network(network, strict=False)
                except ValueError:
                    raise SetupError(f"{name} are addresses or networks, as 10.0.0.0/8, not {network!r}") from None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it. Of names only `localhost` is believed."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_open(self) -> bool:
        """Whether keys cross a network readable."""
        return not self.tls_cert and not self.is_local

    def refuse_open_doors(self) -> None:
        """Keys must not cross a network readable, unless somebody said so."""
        if self.is_open and not self.insecure:
            raise SetupError(
                f"{self.host} is reachable from other machines, and without TLS keys would cross the network readable: "
                "give --tls-cert and --tls-key, or put a proxy with TLS in front of 127.0.0.1, or say --insecure "
                "(TOCSIN_INSECURE=true) to do it anyway"
            )

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """Defaults, then the environment, then what is given (None = not given)."""
        environ = os.environ if environ is None else environ
        known = {f"TOCSIN_{f.name.upper()}": f for f in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if name in known:
                values[known[name].name] = _cast(name, known[name].type, text)
            elif name.startswith("TOCSIN_") and name not in _NOT_SETTINGS and name not in _ALIASES:
                near = difflib.get_close_matches(name, known, n=1)
                raise SetupError(f"unknown setting {name}" + (f"; did you mean {near[0]}?" if near else ""))
        for alias, name in _ALIASES.items():
            if name not in values and environ.get(alias):
                values[name] = environ[alias]
        return replace(cls(), **(values | {k: v for k, v in given.items() if v is not None}))

    @property
    def credentials_file(self) -> Path:
        """Where `tocsin up` leaves url, key and worker_key."""
        return self.home / "credentials.toml"


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def is_origin(text: str) -> bool:
    """Whether it is a scheme and a name, and a port if need be, and nothing more."""
    return re.fullmatch(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{1,5})?", text.lower()) is not None


def _cast(name: str, kind: Any, text: str) -> Any:
    try:
        match kind:
            case "bool":
                return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}[
                    text.lower()
                ]
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "Path":
                return Path(text).expanduser().absolute()
            case _:
                return text
    except (ValueError, KeyError):
        raise SetupError(f"{name}={text!r} is not a valid {kind}") from None
