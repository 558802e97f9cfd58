"""`tocsin demo`: a whole Tocsin in a temporary folder, a job of each kind, a look at them, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from tocsin.cli import job as jobs
from tocsin.cli.live import Changes
from tocsin.cli.output import Column, Document, rich_table
from tocsin.cli.text import milliseconds, why
from tocsin.cli.up import read_credentials
from tocsin.client.sync import Client
from tocsin.errors import SetupError
from tocsin.model.states import FINAL
from tocsin.store.embedded import die_with_parent

if TYPE_CHECKING:
    from rich.console import RenderableType

_READY_SECONDS = 90.0
_STOP_SECONDS = 40.0
_PATIENCE_SECONDS = 20.0  # beyond what was asked for, if a slow machine needs it
_REFRESH_SECONDS = 0.5

JOBS = [
    Column("JOB", lambda job: job.get("name"), whole=True),
    Column("SCHEDULE", jobs.schedule_words),
    Column("KIND", lambda job: job["target"]["kind"]),
    *(replace(column, whole=True) for column in jobs.COLUMNS if column.title in ("STATE", "NEXT RUN", "LAST RUN")),
]
RUNS = [
    Column("RUN", lambda run: f"…{run['id'][-6:]}", whole=True),
    Column("JOB", lambda run: run.get("job_name"), whole=True),
    Column("STATE", lambda run: run["state"]),
    Column("TRY", lambda run: run.get("attempt") or None),
    Column("LAG", lambda run: milliseconds(run.get("start_lag_ms"))),
    Column("TOOK", lambda run: milliseconds(run.get("duration_ms"))),
    Column("WHY", why),
]


def specs(now: datetime, repaired: Path) -> list[Document]:
    """One job of each kind there is. The fragile one fails until the file `repaired` is there."""

    def shell(script: str) -> Document:
        return {"kind": "process", "command": ["sh", "-c", script]}

    def job(name: str, schedule: Document | None, target: Document, **more: Any) -> Document:
        return {"name": name, "target": target} | ({} if schedule is None else {"schedule": schedule}) | more

    at = (now + timedelta(seconds=4)).isoformat()
    report = {"kind": "python", "function": "demo.report"}
    retry = {"max_attempts": 2, "backoff": "fixed", "delay": "PT1S"}
    mend = f"test -e {shlex.quote(str(repaired))} || {{ echo 'no luck yet' >&2; exit 3; }}"
    return [
        job("now", None, shell("echo once, at once")),
        job("delay", {"delay": "PT2S"}, shell("echo two seconds later")),
        job("at", {"at": at}, report | {"kwargs": {"day": "monday"}}),
        job("every", {"every": "PT3S"}, shell("echo again; sleep 1")),
        job("cron", {"cron": "* * * * *", "timezone": "Europe/Berlin"}, report | {"kwargs": {"day": "today"}}),
        job("manual", {"manual": True}, {"kind": "python", "function": "demo.greet"}),
        job("args", {"manual": True}, shell('echo "got $TOCSIN_ARGS"')),
        job("fragile", {"manual": True}, shell(mend), retry=retry),
    ]


def run(seconds: float) -> int:
    """The demonstration; answers the exit code."""
    base = Path(tempfile.mkdtemp(prefix="tocsin-demo-"))
    base.chmod(0o711)  # as root, PostgreSQL runs as another user who must get through
    try:
        with _terminable(), _tocsin(base) as credentials, Client(credentials["url"], credentials["key"]) as client:
            return _Show(client, base / "repaired").play(seconds)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()


# ── a Tocsin of its own ──────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _tocsin(base: Path) -> Iterator[dict[str, str]]:
    """`tocsin up` in a folder; answers where it is and its keys."""
    _say(f"Starting PostgreSQL, a server and a worker in {base} …")
    home, log = base / "home", base / "up.log"
    outer = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_") and k != "DATABASE_URL"}
    command = [sys.executable, "-m", "tocsin", "up", "--port", str(_free_port()), "tocsin.cli.demo_functions:app"]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env=outer | {"TOCSIN_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us, who stop it
            preexec_fn=die_with_parent(signal.SIGTERM),
        )
    try:
        _wait_until_ready(process, log)
        yield read_credentials(home / "credentials.toml")
    finally:
        _say("Stopping …")
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_SECONDS)
        except BaseException:
            process.kill()  # its children end with it
            process.wait()
            raise


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while "Tocsin is ready" not in (told := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SetupError(f"Tocsin did not start: {told.strip()[-2000:]}")
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM and a closed terminal end it the way Ctrl-C does: in order."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────


class _Show:
    """Makes the jobs, looks at them, mends the broken one."""

    def __init__(self, client: Client, repaired: Path) -> None:
        self._client = client
        self._repaired = repaired
        self._changes = Changes(RUNS)

    def play(self, seconds: float) -> int:
        """All of it; 0 if everything went as it should."""
        made = {spec["name"]: self._client.create_job(spec) for spec in specs(datetime.now(UTC), self._repaired)}
        self._client.run_job(made["manual"]["id"], {"who": "Ada"})
        self._client.run_job(made["args"]["id"], {"day": "monday", "pages": 3})
        broken = self._client.run_job(made["fragile"]["id"])["id"]
        _say(f"Created {len(made)} jobs: {', '.join(made)}")
        once = [name for name in made if name != "cron"]  # its minute may not come while we look
        with self._view() as draw:
            enough = self._wait(seconds, lambda: self._ended(once), draw)

        letters = [letter["id"] for letter in self._client.list_dead()]
        if letters != [broken]:
            _say(f"expected the run of `fragile` as the one dead letter, found {letters}")
            return 1
        _say(f"Dead letter …{broken[-6:]}: `fragile` used up its 2 attempts. Repairing the cause, and redriving it:")
        self._repaired.touch()
        again = self._client.redrive_dead([broken])["items"][0]["id"]
        self._wait(0, lambda: self._client.get_run(again)["state"] in FINAL)
        state = self._client.get_run(again)["state"]
        _say(f"Run …{again[-6:]} of `fragile` {state}")
        healed = state == "succeeded"
        return self._sum_up(made, enough, healed)

    def _ended(self, names: Sequence[str]) -> bool:
        last = {job["name"]: (job.get("last_run") or {}).get("state") for job in self._client.list_jobs()}
        return all(last.get(name) == ("dead" if name == "fragile" else "succeeded") for name in names)

    def _sum_up(self, made: dict[str, Document], enough: bool, healed: bool) -> int:
        ended = [run for run in self._client.list_runs() if run["state"] in FINAL]
        succeeded = sum(run["state"] == "succeeded" for run in ended)
        for name in ("manual", "args"):
            found = next(self._client.list_runs(job=made[name]["id"]))
            lines = [line["text"] for line in self._client.logs(found["id"])]
            _say(f"Run of `{name}` {found['state']}; log: {' / '.join(lines)}; result: {found.get('result')}")
        upcoming = self._client.get_job(made["cron"]["id"])
        _say(f"`cron` goes on {upcoming['schedule'].get('description')}, next at {upcoming['next_run_at']}")
        left = len(list(self._client.list_dead()))
        _say(f"{len(ended)} runs ended, {succeeded} of them succeeded; dead letters left: {left}")
        if not enough or not healed:
            _say("not everything went as it should; try again with a longer --seconds")
        return 0 if enough and healed else 1

    @staticmethod
    def _wait(seconds: float, enough: Callable[[], bool], draw: Callable[[], None] = lambda: None) -> bool:
        """Look for so long, and a while longer if it is not enough by then; answers whether it was."""
        begun = time.monotonic()
        while True:
            draw()
            passed = time.monotonic() - begun
            if passed >= seconds and enough():
                draw()
                return True
            if passed >= seconds + _PATIENCE_SECONDS:
                return False
            time.sleep(_REFRESH_SECONDS)

    @contextlib.contextmanager
    def _view(self) -> Iterator[Callable[[], None]]:
        if not sys.stdout.isatty():
            yield lambda: self._changes.print(self._newest(100), as_json=False)
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(highlight=False)
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as screen:
            yield lambda: screen.update(self._picture(console.height), refresh=True)

    def _newest(self, most: int) -> list[Document]:
        return list(islice(self._client.list_runs(limit=most), most))

    def _picture(self, height: int) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        made = list(self._client.list_jobs())[::-1]
        newest = self._newest(max(3, height - len(made) - 5))
        return Group(
            rich_table(JOBS, [[column.text(job) for column in JOBS] for job in made]),
            Text(),
            rich_table(RUNS, [[column.text(run) for column in RUNS] for run in newest]),
        )
