"""A backup taken under load, restored to a point in time, and gone on from while old workers still hold what the lost
past gave them: nothing acknowledged before that point is lost, no fence comes twice, nothing of that past is believed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests import PATIENCE
from tests.conftest import Cluster
from tocsin.store import embedded
from tocsin.store.embedded import Embedded

from . import ledger
from .checker import check, summary
from .cluster import ROOT, Site, folder_for_all, until
from .driver import Driver, Load, Made, job_spec, run_load, stop_schedules, wait_until_ended
from .evidence import Evidence, Target, collect

SLACK = 2.0


class Archive:
    """A PostgreSQL that archives its WAL, and the way back to any instant since a backup."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self.wal = folder / "wal"
        for part in (self.wal, folder / "home", folder / "again"):
            part.mkdir()
            part.chmod(0o777 if part == self.wal else 0o711)  # PostgreSQL runs as another user where we are root
        self._configure(archive_mode="on", archive_command=f"cp %p {self.wal}/%f")
        self.cluster = Cluster(folder / "home")

    def _configure(self, **settings: str) -> None:
        self._patch.setattr(embedded, "_SETTINGS", embedded._SETTINGS | settings)

    def back_up(self) -> None:
        """pg_basebackup of the running database."""
        program = self.cluster.server._installation.program("pg_basebackup")
        url = self.cluster.as_superuser()
        command = [program, "--dbname", url, "--pgdata", str(self._folder / "again" / "data"), "--checkpoint", "fast"]
        subprocess.run([*command, "--wal-method", "none"], check=True, capture_output=True)

    def restore(self, instant: str) -> tuple[Embedded, str]:
        """Replay the archive up to an instant, in another home; answers that PostgreSQL, running, and its URL."""
        home, data = self._folder / "again", self._folder / "again" / "data"
        data.joinpath("recovery.signal").touch()
        shutil.copytree(self._folder / "home" / "secrets", home / "secrets")
        account = (self._folder / "home" / "data").stat()
        for path in (data, *data.rglob("*")):
            os.chown(path, account.st_uid, account.st_gid)
        self._configure(
            restore_command=f"cp {self.wal}/%f %p",
            recovery_target_time=instant,
            recovery_target_action="promote",
            hot_standby="off",  # no connection before it is there
        )
        restored = Embedded(home)
        return restored, restored.start()


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Archive]:
    with folder_for_all("tocsin-restore-") as folder:
        archive = Archive(folder, monkeypatch)
        try:
            yield archive
        finally:
            archive.cluster.server.stop(immediate=True)


async def now(url: str) -> datetime:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval("select clock_timestamp()")  # type: ignore[no-any-return]
    finally:
        await connection.close()


def tocsin(*command: str, **env: str) -> Any:
    """What a command of ours prints as JSON."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TOCSIN_") and k != "DATABASE_URL"}
    words = [sys.executable, "-m", "tocsin", *command, "--json"]
    done = subprocess.run(words, cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_a_point_in_time_is_gone_back_to_while_old_workers_live_on(
    archive: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = archive.cluster
    with Site(tmp_path, first.template_url, first.keys) as site:
        server = await site.server("server")
        workers = await asyncio.gather(*(site.worker(f"w{n}", server) for n in (1, 2)))
        async with Driver([server.url], site.keys["key"], site.client_ledger) as driver:
            load = Load(site.job_ledger, 3.0, batches_per_second=6, python=True)
            slow = await driver.create_job(job_spec(load, {"manual": True}))
            held = await driver.create_runs(slow, [{"first_seconds": 60, "seconds": 0}] * 3)
            loading = asyncio.create_task(run_load(driver, load))
            await until("the slow runs have started", _started(site, held))
            await asyncio.to_thread(archive.back_up)
            await asyncio.sleep(0.7)
            answered_by = ledger.wall_us()
            instant = await now(first.as_superuser())
            unheard_of = await driver.create_runs(slow, [{"seconds": 0}] * 5)
            await until("runs of the past that will be lost have started", _started(site, unheard_of))
            made = await loading

            server.terminate()
            await server.ended()
            first.server.stop()
            restored, url = archive.restore(
                str(instant)
            )  # in this thread: PostgreSQL dies with the one that started it
            try:
                told = await asyncio.to_thread(tocsin, "restored", "--yes", DATABASE_URL=url)
                server.env["DATABASE_URL"] = url
                began_again = ledger.wall_us()
                await server.start()
                load.seconds = 2.0
                made = Made.all([made, await run_load(driver, load)])
                await stop_schedules(driver, made)
                await wait_until_ended(driver, made)
                evidence = await seen(site, driver, answered_by, began_again)
                assert [w.registrations() for w in workers] == [2, 2], "leases of the lost past are refused"
                assert all(worker.alive for worker in workers)
            finally:
                restored.stop(immediate=True)
    starts = Counter((x["run_id"], x["fence"]) for x in ledger.read(site.job_ledger) if x["phase"] == "start")
    lost_past = forget_the_lost_past(evidence, instant, told["epoch"])
    with capsys.disabled():
        print(f"\nback to an instant under load: {told}; {lost_past} starts of a lost past; {summary(evidence)}")
    assert [str(b) for b in check(evidence)] == []
    assert max(starts.values()) == 1, "no fence was handed out twice"
    assert told["workers"] == 2 and told["runs"] >= len(held) and lost_past >= len(unheard_of)
    for run in evidence.runs:
        if run["id"] in held:
            assert (run["state"], run["attempt"], run["losses"], run["failures"]) == ("succeeded", 2, 0, 0)
            assert run["fence"] >> 40 == told["epoch"]


def _started(site: Site, run_ids: list[str]) -> Any:
    async def look() -> bool:
        return {x["run_id"] for x in ledger.read(site.job_ledger)} >= set(run_ids)

    return look


async def seen(site: Site, driver: Driver, answered_by: int, began_again: int) -> Evidence:
    """What was answered in the lost past is not promised any more: to the checker nobody answered it."""
    known = site.folder / "known.ledger"
    kept = ledger.Appender(known)
    for line in ledger.read(site.client_ledger):
        if line["phase"] == "intent" or not answered_by < line["wall_us"] < began_again:
            kept.write(line)
    kept.close()
    target = Target(site.servers[0].url, site.keys["key"], driver.tag, apart=0.3, settle=0, slack=SLACK)
    return await collect(target, [known], [site.job_ledger])


def forget_the_lost_past(evidence: Evidence, instant: datetime, epoch: int) -> int:
    """Drop what jobs noted under the old epoch after the instant; answers how many starts that were."""
    lost = [x for x in evidence.lines if x["wall_us"] > instant.timestamp() * 1e6 and x["fence"] >> 40 != epoch]
    evidence.lines = [x for x in evidence.lines if x not in lost]
    return sum(x["phase"] == "start" for x in lost)
