"""`tocsin doctor`: looks at this machine, the server and the workers, and says what to do about what it finds."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from tocsin import __version__
from tocsin.cli.output import Document, colour, print_json
from tocsin.cli.shared import tenant
from tocsin.cli.text import instant, length, plain
from tocsin.client import credentials
from tocsin.client.core import Answer, refusal
from tocsin.errors import SetupError, TocsinError
from tocsin.settings import Settings

if TYPE_CHECKING:
    import httpx

    from tocsin.store.horizon import Holder

Status = Literal["ok", "warn", "fail"]

_TIMEOUT = 5.0
_SKEW = timedelta(seconds=2)  # the header the server's time is read from has whole seconds
_LATE = timedelta(seconds=60)
_EXPIRES_SOON = timedelta(days=14)
_LONG_TRANSACTION = 60.0  # seconds
_MIB = 1024 * 1024
_DISK_LOW, _DISK_FULL = 1024 * _MIB, 200 * _MIB


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do if it is not well."""

    check: str
    status: Status
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at everything that can be reached from here."""
    return list(_examine())


def print_findings(findings: list[Finding], as_json: bool) -> None:
    """One line each, with the advice below it."""
    if as_json:
        healthy = all(finding.status != "fail" for finding in findings)
        print_json({"ok": healthy, "checks": [asdict(finding) for finding in findings]})
        return
    say = _teller()
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        say(finding.status, f"  {finding.check:<{width}}  {plain(finding.detail)}")
        if finding.advice:
            say("", f"{'':{width + 4}}→ {plain(finding.advice)}")
    worst = [sum(finding.status == status for finding in findings) for status in ("fail", "warn")]
    say("", f"{worst[0]} failed, {worst[1]} to look at" if any(worst) else "nothing is wrong here")


def _teller() -> Any:
    if not sys.stdout.isatty():
        return lambda status, text: typer.echo(f"{status:<4}{text}")
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    return lambda status, text: console.print(Text.assemble((f"{status:<4}", colour(status)), text), soft_wrap=True)


def _examine() -> Iterator[Finding]:
    yield Finding("client", "ok", f"tocsin {__version__}, Python {platform.python_version()}")
    try:
        settings = Settings.load()
        yield Finding("settings", "ok", "every TOCSIN_… variable is known and valid")
    except SetupError as error:
        settings = Settings()
        yield Finding("settings", "fail", str(error), "correct or unset it; docs/reference/settings.md has them all")
    yield from _home(settings)
    yield from _database(settings)
    try:
        found = credentials.find()
    except TocsinError as error:
        yield Finding("credentials", "fail", str(error), "set TOCSIN_URL and TOCSIN_KEY, or start `tocsin up`")
        return
    yield from _credentials_file(settings.credentials_file)
    import httpx

    from tocsin.client.session import headers

    with httpx.Client(
        base_url=found.url,
        headers=headers(found, tenant()),
        verify=found.trust(),
        timeout=_TIMEOUT,
    ) as http:
        yield from _Server(http, found.url).examine()


# ── this machine ─────────────────────────────────────────────────────────────────────────────────────────────────


def _home(settings: Settings) -> Iterator[Finding]:
    if not settings.home.exists():
        return  # nothing of Tocsin's is on this machine, and need not be
    try:
        free = shutil.disk_usage(settings.home).free
    except OSError as error:
        yield Finding("disk", "warn", f"{settings.home}: {error.strerror}", "check who owns the home and its mode")
        return
    told = f"{free / _MIB / 1024:.1f} GiB free at {settings.home}"
    advice = "make room: the database stops accepting work when the disk is full"
    status: Status = "fail" if free < _DISK_FULL else "warn" if free < _DISK_LOW else "ok"
    yield Finding("disk", status, told, advice if status != "ok" else "")


def _credentials_file(path: Path) -> Iterator[Finding]:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        yield Finding("credentials", "ok", "from TOCSIN_URL and TOCSIN_KEY")
        return
    if mode & 0o077:
        yield Finding(
            "credentials", "fail", f"others than you can open {path} (mode {mode:04o})", f"chmod 600 {path}, new keys"
        )
    else:
        used = "" if not (os.environ.get("TOCSIN_URL") and os.environ.get("TOCSIN_KEY")) else ", but TOCSIN_KEY is used"
        yield Finding("credentials", "ok", f"{path} (mode {mode:04o}){used}")


def _database(settings: Settings) -> Iterator[Finding]:
    if settings.database_url:
        try:
            current = asyncio.run(_ask_database(settings.database_url))
        except (TocsinError, OSError, TimeoutError) as error:
            yield Finding("database", "fail", str(error) or "no answer in time", "check DATABASE_URL and PostgreSQL")
            return
        if current is None:
            yield Finding("database", "fail", "its schema is not current", "tocsin migrate")
        else:
            yield Finding("database", "ok", "reachable, its settings are safe, its schema is current")
            yield from _transactions(current)
        return
    try:
        lines = (settings.home / "data" / "postmaster.pid").read_text().splitlines()
    except PermissionError:
        return
    except OSError:
        if (settings.home / "data").exists():
            yield Finding("database", "fail", f"the PostgreSQL of {settings.home} is not running", "start `tocsin up`")
        return
    state = lines[7].strip() if len(lines) > 7 else "starting"
    if not _lives(lines[0]):
        yield Finding("database", "fail", f"the PostgreSQL of {settings.home} was killed", "start `tocsin up`")
    elif state != "ready":
        yield Finding("database", "warn", f"PostgreSQL is {state}", f"{settings.home}/logs/postgres.log says why")
    else:
        yield Finding("database", "ok", f"PostgreSQL of {settings.home} is ready (pid {lines[0].strip()})")


def _transactions(found: list[Holder]) -> Iterator[Finding]:
    """Whoever keeps dead rows from being removed, by name."""
    for holder in found:
        if holder.holds and holder.seconds > _LONG_TRANSACTION:
            advice = "end it (pg_terminate_backend, or drop the slot): dead rows pile up behind it and slow the queue"
            yield Finding("horizon", "warn", str(holder), advice)


async def _ask_database(url: str) -> list[Holder] | None:
    """The open transactions; None if the schema is not current."""
    from tocsin.store.db import Database
    from tocsin.store.horizon import Horizon
    from tocsin.store.migrate import is_current

    database = Database(url, size=1)
    try:
        async with asyncio.timeout(15):
            await database.open()  # refuses settings under which a commit may be lost, and roles that see too much
            return (await Horizon(database).look())[0] if await is_current(database) else None
    finally:
        await database.close()


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


# ── the server, its metrics, the workers ─────────────────────────────────────────────────────────────────────────


class _Server:
    """What can be asked of the server, each question once and briefly."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http = http
        self._url = url
        self._now = datetime.now(UTC)

    def _get(self, path: str, **query: str | int) -> Answer:
        reply = self._http.get(path, params=query)
        return Answer(reply.status_code, reply.headers, reply.content)

    def examine(self) -> Iterator[Finding]:
        import httpx

        try:
            yield from self._reach()
            yield from self._ready()
            yield from self._metrics()
            yield from self._workers()
            yield from self._jobs()
            yield from self._dead_letters()
        except (httpx.RequestError, httpx.InvalidURL) as error:
            yield Finding(
                "server",
                "fail",
                f"cannot reach {self._url}: {str(error) or type(error).__name__}",
                "start it with `tocsin up` or `tocsin server`; TOCSIN_URL says where it is",
            )

    def _reach(self) -> Iterator[Finding]:
        before = datetime.now(UTC)
        begun = time.monotonic()
        answer = self._get("/healthz")
        took = timedelta(seconds=time.monotonic() - begun)
        version = self._version()
        told = f"{self._url} answers in {length(took)}" + (f", tocsin {version}" if version else "")
        if answer.status != 200:
            yield Finding("server", "fail", f"{self._url} answers {answer.status}", "is this Tocsin's address?")
        elif version and version != __version__:
            yield Finding("server", "warn", told, f"the client is {__version__}: use the same version on both sides")
        else:
            yield Finding("server", "ok", told)
        yield from self._clock(answer.headers, before + took / 2)

    def _version(self) -> str:
        """The server's, as its description says; one that has none leaves it open."""
        info = _document(self._get("/openapi.json")).get("info")
        return str(info.get("version") or "") if isinstance(info, dict) else ""

    def _clock(self, headers: Mapping[str, str], here: datetime) -> Iterator[Finding]:
        try:
            there = parsedate_to_datetime(headers.get("date", "")) + timedelta(seconds=0.5)
        except ValueError:
            return
        self._now = there
        if abs(there - here) > _SKEW:
            ahead = "behind" if there > here else "ahead of"
            told = f"this machine is {length(abs(there - here))} {ahead} the server"
            yield Finding("clock", "warn", told, "synchronise it (NTP); schedules go by the database's clock")
        else:
            yield Finding("clock", "ok", f"within {length(_SKEW)} of the server's")

    def _ready(self) -> Iterator[Finding]:
        answer = self._get("/readyz")
        if answer.status == 200:
            yield Finding("ready", "ok", "its database is reachable and its schema current")
            return
        problem = refusal(answer)
        advice = "tocsin migrate" if problem.code == "schema_old" else "does PostgreSQL run? the server's log says more"
        yield Finding("ready", "fail", f"{problem.detail} [{problem.code}]", advice)

    @staticmethod
    def _certificate(left: timedelta) -> Finding:
        advice = "renew it: the server takes up new files by itself"
        if left <= timedelta():
            return Finding("certificate", "fail", f"the server's certificate ended {length(-left)} ago", advice)
        told = f"the server's certificate ends in {length(left)}"
        return (
            Finding("certificate", "ok", told) if left > _EXPIRES_SOON else Finding("certificate", "warn", told, advice)
        )

    def _metrics(self) -> Iterator[Finding]:
        answer = self._get("/metrics")
        found = metrics(answer.content.decode(errors="replace")) if answer.status == 200 else {}
        if not found:
            advice = "look at the server's log"
            if answer.status in (401, 403):
                advice = "ask with a platform key, or from an address in TOCSIN_METRICS_FROM"
            yield Finding("queue", "warn", f"/metrics answers {answer.status}", advice)
            return
        overdue = timedelta(seconds=found.get("tocsin_overdue_oldest_seconds", 0))
        ready = sum(v for k, v in found.items() if k.startswith("tocsin_queue_depth") and 'state="ready"' in k)
        if overdue > _LATE:
            told = f"a run has been due for {length(overdue)} and nobody takes it ({ready:.0f} are ready)"
            yield Finding("queue", "warn", told, "more workers or slots; is there a worker in every pool?")
        else:
            yield Finding("queue", "ok", "nothing that is due waits for long")
        if expires := found.get("tocsin_tls_expires_timestamp_seconds"):
            yield self._certificate(datetime.fromtimestamp(expires, UTC) - self._now)
        skew = timedelta(seconds=found.get("tocsin_clock_skew_seconds", 0))
        if abs(skew) > timedelta(seconds=1):
            told = f"the server's clock is {length(abs(skew))} off the database's"
            yield Finding("server clock", "warn", told, "synchronise both machines (NTP)")
        yield from self._horizon(found)
        errors = {k: v for k, v in found.items() if k.startswith("tocsin_loop_errors_total") and v}
        if errors:
            names = ", ".join(f"{k.partition('=')[2].strip('}').strip(chr(34))} {v:.0f}" for k, v in errors.items())
            yield Finding("loops", "warn", f"failed turns since its start: {names}", "the server's log says why")

    def _horizon(self, found: dict[str, float]) -> Iterator[Finding]:
        held = found.get("tocsin_pg_xmin_age_seconds", 0)
        if held > _LONG_TRANSACTION:
            told = f"a transaction has kept dead rows from being removed for {length(timedelta(seconds=held))}"
            yield Finding("horizon", "warn", told, "end it; the server's log names its session")
        elif not found.get("tocsin_pg_sees_all_sessions", 1):
            told = "long transactions of other database users would not be noticed: their sessions are not shown to us"
            yield Finding("horizon", "warn", told, "as an administrator: grant pg_read_all_stats to tocsin_engine")
        else:
            yield Finding("horizon", "ok", "no transaction has been open for long")

    def _workers(self) -> Iterator[Finding]:
        items, problem = self._items("/v1/workers", limit=500)
        if problem is not None:
            yield problem
            return
        live = [w for w in items if w.get("state") == "live" and not self._lapsed(w)]
        lapsed = [w for w in items if w.get("state") in ("live", "draining") and self._lapsed(w)]
        if live:
            slots = sum(int(w.get("slots") or 0) for w in live)
            pools = ", ".join(sorted({str(w.get("pool")) for w in live}))
            yield Finding("workers", "ok", f"{len(live)} alive with {slots} slots (pools: {pools})")
        else:
            yield Finding("workers", "fail", "none is alive: nothing can run", "start one: tocsin worker [module:app]")
        if lapsed:
            names = ", ".join(str(w.get("name")) for w in lapsed[:3])
            yield Finding(
                "leases", "warn", f"{len(lapsed)} fell silent: {names}", "look at those machines; runs move on"
            )
        other = sorted({str(w["version"]) for w in live if w.get("version") and w["version"] != __version__})
        if other:
            yield Finding("versions", "warn", f"workers of version {', '.join(other)}", f"this is {__version__}")

    def _lapsed(self, worker: Document) -> bool:
        until = instant(worker.get("lease_until"))
        return until is not None and until < self._now - _SKEW

    def _jobs(self) -> Iterator[Finding]:
        items, problem = self._items("/v1/jobs", state="active", limit=500)
        if problem is not None:
            return  # the same as for the workers
        due = [(at, job) for job in items if (at := instant(job.get("next_run_at"))) and at < self._now - _LATE]
        if due:
            oldest, job = min(due, key=lambda pair: pair[0])
            name = job.get("name") or job["id"]
            told = f"{len(due)} of the newest {len(items)} active jobs should have started, first {name}"
            told += f" {length(self._now - oldest)} ago"
            yield Finding("schedules", "warn", told, f"tocsin run list --job {name}; are its pool's workers busy?")
        else:
            yield Finding("schedules", "ok", "none of the newest active jobs is late" if items else "no active job")

    def _dead_letters(self) -> Iterator[Finding]:
        items, problem = self._items("/v1/dead-letters", limit=100)
        if problem is None and items:
            told = f"{len(items)}{' or more' * (len(items) == 100)} wait for a decision"
            yield Finding("dead letters", "warn", told, "tocsin dead list, then redrive or discard")

    def _items(self, path: str, **query: str | int) -> tuple[list[Document], Finding | None]:
        answer = self._get(path, **query)
        if answer.status == 200:
            items = _document(answer).get("items")
            return (items if isinstance(items, list) else []), None
        problem = refusal(answer)
        told = f"{path} answers {answer.status}: {problem.detail} [{problem.code}]"
        match answer.status:
            case 401:
                return [], Finding("key", "fail", told, "check TOCSIN_KEY, or the key in credentials.toml")
            case 403:
                return [], Finding("key", "warn", told, "a key with another role sees more")
            case _:
                return [], Finding("key", "fail", told, "the server's log has the details")


def _document(answer: Answer) -> Document:
    import msgspec

    try:
        found = msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def metrics(text: str) -> dict[str, float]:
    """The samples of a page in Prometheus' format, by name and labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            try:
                found[name] = float(value)
            except ValueError:
                continue
    return found
