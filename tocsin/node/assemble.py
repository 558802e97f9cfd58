"""Puts a server node together: database, loops, gateway, HTTP. Every node is the same; none owns anything."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

from tocsin import __version__
from tocsin.errors import ApiProblem, SetupError, Unavailable
from tocsin.failpoints import Failpoints
from tocsin.flow import keys, marker, partitions, seal, servers
from tocsin.flow import restored as restoration
from tocsin.flow.note import Notebook
from tocsin.flow.payloads import Payloads
from tocsin.flow.pools import PoolBook
from tocsin.flow.quotas import Allowances
from tocsin.flow.secrets import SecretBook
from tocsin.flow.shared.contents import Contents
from tocsin.flow.shared.idempotency import Replay, Wish
from tocsin.flow.shared.lanes import LaneBook
from tocsin.flow.shared.nodes import Nodes
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.sealing import DataKeys
from tocsin.flow.shared.specs import SpecBook
from tocsin.flow.shared.transitions import Hint, Stop
from tocsin.flow.submit import Answer, JobRequest, RunsRequest, Stored, submit_batch, submit_jobs, submit_runs
from tocsin.node.archivist import Archivist
from tocsin.node.aside import Aside
from tocsin.node.backfiller import Backfiller
from tocsin.node.breaker import Breaker
from tocsin.node.compactor import Compactor
from tocsin.node.conductor import Conductor
from tocsin.node.dispatcher import Dispatcher
from tocsin.node.doorkeeper import Doorkeeper
from tocsin.node.eraser import Eraser
from tocsin.node.events import Events
from tocsin.node.gateway import Gateway
from tocsin.node.group import GroupCommit
from tocsin.node.handover import Courier
from tocsin.node.loop import Loop
from tocsin.node.planner import Planner
from tocsin.node.reaper import Canceller, Caretaker, Follower, Reaper, Sweeper
from tocsin.node.sealer import Anchorer, Sealer
from tocsin.node.server.app import build
from tocsin.node.server.authenticator import Authenticator
from tocsin.node.server.edge import Edge, common_headers
from tocsin.node.server.issuers import IssuerBook
from tocsin.node.server.login import Logins
from tocsin.node.server.protocol import HttpServer
from tocsin.node.server.tls import Certificate
from tocsin.node.tails import Tails
from tocsin.node.unfolder import Unfolder
from tocsin.node.watchdog import Watchdog
from tocsin.node.whisper import Whisper
from tocsin.privacy import hide_memory
from tocsin.settings import Settings
from tocsin.store import migrate as migrations
from tocsin.store.db import Database, connect_plain
from tocsin.store.objects import ObjectStore
from tocsin.store.parquet import Parquet
from tocsin.store.room import Room
from tocsin.store.vault import MasterKeys
from tocsin.telemetry import get_logger, setup_logging

log = get_logger("node")
_PATIENCE = 30.0  # seconds for a database that is starting, or failing over, when the server starts
_OBJECTS_PATIENCE = 10.0  # seconds for object storage at that time: a server serves without it, too
_OWN_FILES = 256  # for PostgreSQL, object storage and whatever else is not a caller's
_GRACE_SECONDS = 10.0  # for requests under way when the server is told to go


class Node:
    """One server node."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.horizon = timedelta(seconds=settings.horizon_seconds)
        self.db = Database(
            settings.database_url, size=settings.database_connections, failpoints=Failpoints(settings.failpoints)
        )
        self.objects = ObjectStore(settings.objects_url, settings.home / "objects")
        self.parquet = Parquet(self.objects, settings.home / "cold")
        self.anchor_series = seal.Series()
        self.master_keys = MasterKeys.load(settings.master_key, settings.home)
        self.wish_keys = self.master_keys.derive_all("idempotency")
        self.data_keys = DataKeys(self.db, self.master_keys)
        self.parcels = Parcels(self.db, self.objects)
        self.payloads = Payloads(self.db, self.master_keys, self.data_keys, self.parcels)
        self.contents = Contents(self.data_keys, self.parcels)
        self.aside = Aside()
        self.edge = Edge(settings)
        self.issuers = IssuerBook(settings.oidc)
        self.logins = Logins(self)
        self.authenticator = Authenticator(self)
        self.lanes = LaneBook(self.db)
        self.specs = SpecBook(self.db)
        self.notes = Notebook(self.db, self.specs, self.data_keys, self.parcels)
        self.pools = PoolBook(self.db)
        self.allowances = Allowances(self.db)
        self.dispatcher = Dispatcher(
            self.db,
            self.lanes,
            lead=timedelta(seconds=settings.ahead_seconds),
            near_wait=timedelta(seconds=settings.prefer_seconds),
            patience=timedelta(seconds=settings.reserve_after_seconds),
        )
        self.whisper = Whisper(self.db, self._heard, self._stop, self._forget)
        self.conductor = Conductor(self.db, self.lanes, self.specs, self.tell)
        self.unfolder = Unfolder(self.db, self.parcels, self.tell)
        self.events = Events(self.db)
        self.tails = Tails(self.db, self.objects)
        self.backfiller = Backfiller(self.db, self.tell)
        self._jobs: GroupCommit[JobRequest, Answer] = GroupCommit(self._commit_jobs, 500)
        self._runs: GroupCommit[RunsRequest, Answer] = GroupCommit(self._commit_runs, 100)
        self._loops: list[Loop] = []
        self.leave = asyncio.Event()
        self.retired = False
        self._server = servers.Server.this(settings.port, __version__)
        self.gateway: Gateway
        self.key_hashes: keys.KeyHashes
        self.doorkeeper: Doorkeeper
        self.eraser = Eraser(self.db, self.objects, self.lanes, self.tell)

    async def start(self, *, loops: bool = True) -> None:
        """Open the database and set every loop going (or none: then somebody else calls their turns)."""
        await self.db.open(_PATIENCE)
        await migrations.refuse_newer(self.db)
        await partitions.make_ahead(self.db)
        await self.lanes.refresh()
        self.key_hashes = await keys.KeyHashes.load(self.db, self.master_keys)
        tokens = await keys.RunTokens.load(self.db, self.master_keys)
        if not self.master_keys.ids:
            log.warning(
                "there is no master key: who reads the database can sign tokens of runs under way; no secrets, no "
                "login with a browser, no signed anchors of the audit; set TOCSIN_MASTER_KEY"
            )
        await self._compare_objects()
        courier = Courier(SecretBook(self.db, self.master_keys), self.payloads, self.contents, self.notes)
        self.gateway = Gateway(
            self.db,
            self.settings,
            self.dispatcher,
            self.specs,
            tokens,
            courier,
            self.notes,
            self.objects,
            self.parcels,
            self.tell,
        )
        guests = (self.gateway, self.events, self.tails)
        self.doorkeeper = Doorkeeper(self.authenticator.living, guests, self.authenticator.note_used)
        sweeper = Sweeper(self.db, self.tell, self.dispatcher.served_lanes, self._free_lanes)
        self.dispatcher.on_replace = self.conductor.on_replace = sweeper.replace
        ends = self.gateway.ends
        ends.on_filled = self.conductor.on_filled = self.backfiller.wake
        ends.on_heads = self.unfolder.on_heads = self.conductor.wake
        ends.on_folded = self.unfolder.wake
        self._loops = [
            self.dispatcher,
            self.whisper,
            Planner(self.db, self.horizon, self.tell),
            Reaper(self.db, self.specs, self.tell),
            sweeper,
            Canceller(self.db, self.tell),
            Follower(self.db, self.tell),
            self.backfiller,
            self.conductor,
            self.unfolder,
            Breaker(self.db, self.tell),
            Archivist(self.db, self.objects, self.parquet, self.settings),
            Sealer(self.db),
            Anchorer(self.db, self.objects, self.master_keys, self.anchor_series),
            Caretaker(self.db, self._server, self.retire, self._measure_pools, Room(self.db, self._folders())),
            self.events,
            self.tails,
            self.doorkeeper,
            Compactor(self.db, self.objects),
            self.eraser,
        ]
        for loop in self._loops if loops else ():
            loop.start()

    def _folders(self) -> dict[str, Path]:
        """What is on a disk of this machine: log lines and archives, and the database if `tocsin up` brought it."""
        found = {"logs": self.objects.folder} if self.objects.folder is not None else {}
        home = self.settings.home
        if f"host={quote(str(home / 'run'))}" in self.settings.database_url:
            found |= {"table": home / "data", "wal": home / "data" / "pg_wal"}
        return found

    async def _compare_objects(self) -> None:
        try:
            async with asyncio.timeout(_OBJECTS_PATIENCE):
                await marker.compare(self.db, self.objects, self.settings.adopt_objects)
        except (Unavailable, TimeoutError) as error:
            why = str(error) or f"no answer within {_OBJECTS_PATIENCE:g} seconds"
            log.warning("whether the object storage is that of the other servers is not known", error=why)

    def retire(self) -> None:
        """Go, to be started anew: what this node remembers is not to be trusted any more."""
        self.retired = True
        self.leave.set()

    async def stop(self) -> None:
        """Let every turn under way finish, then close."""
        await asyncio.gather(*(loop.stop() for loop in self._loops), return_exceptions=True)
        self.parquet.close()
        self.aside.close()
        await self.db.close()

    # ── what became claimable, and who must stop ─────────────────────────────────────────────────────────────────

    def _free_lanes(self) -> set[int]:
        return self.dispatcher.free_lanes() | self.conductor.lanes()

    def tell(self, hints: Iterable[Hint], stops: Sequence[Stop] = ()) -> None:
        """Tell the dispatchers, here and on the other nodes."""
        hints = list(hints)
        self.conductor.heard(hints, stops)
        if hints:
            self.dispatcher.hint(hints)
        if stops:
            self.gateway.stop(stops)
        if hints or stops:
            self.whisper.say(hints, stops)

    def _heard(self, hints: Sequence[Hint], everywhere: bool) -> None:
        self.dispatcher.hint(hints)
        self.conductor.heard(hints)
        if everywhere:
            self.dispatcher.rescan()

    def _stop(self, stops: Sequence[Stop], drains: Sequence[str]) -> None:
        self.conductor.heard((), stops)
        self.gateway.stop(stops)
        self.gateway.drain(drains)

    def drain(self, worker_ids: Sequence[str]) -> None:
        """Tell workers to go, wherever they are connected, at once; their next heartbeat would tell them, too."""
        self.gateway.drain(worker_ids)
        self.whisper.say(drains=worker_ids)

    def end_keys(self, key_ids: Sequence[str]) -> None:
        """Keys have ended: let them be refused here and on the other nodes at once, not half a second later."""
        self._forget(key_ids)
        self.whisper.say(keys=key_ids)

    def _forget(self, key_ids: Sequence[str]) -> None:
        if key_ids:
            self.authenticator.forget(key_ids)
            self.doorkeeper.wake()

    async def _measure_pools(self) -> None:
        await self.pools.measure(self.dispatcher.handed_out())

    # ── submissions, many calls in one commit ────────────────────────────────────────────────────────────────────

    async def submit_job(self, request: JobRequest) -> Stored | Replay:
        """Store a job; raises why not."""
        if request.spec.depends_on:
            [answer] = await self._commit_jobs([request])
            return _or_raise(answer)
        return _or_raise(await self._jobs.add(request))

    async def submit_runs(self, request: RunsRequest) -> Stored | Replay:
        """Make runs; raises why not."""
        return _or_raise(await self._runs.add(request))

    async def submit_batch(
        self, requests: Sequence[JobRequest], wish: Wish | None, nodes: Nodes | None = None
    ) -> Stored | Replay:
        """Store all jobs or none; or the one that is a workflow, with its nodes. Raises why none."""
        answer, hints = await submit_batch(self.db, self.lanes, requests, wish, self.horizon, nodes)
        self.tell(hints)
        return answer

    async def _commit_jobs(self, requests: Sequence[JobRequest]) -> list[Answer]:
        answers, hints = await submit_jobs(self.db, self.lanes, requests, self.horizon)
        self.tell(hints)
        return answers

    async def _commit_runs(self, requests: Sequence[RunsRequest]) -> list[Answer]:
        answers, hints = await submit_runs(self.db, requests)
        self.tell(hints)
        return answers


def _or_raise(answer: Answer) -> Stored | Replay:
    if isinstance(answer, ApiProblem):
        raise answer
    return answer


# ── entry points of the command line ─────────────────────────────────────────────────────────────────────────────


def serve(settings: Settings) -> int:
    """Run a server node until SIGTERM or SIGINT."""
    _check(settings)
    setup_logging(settings.log_level, settings.log_json)
    hide_memory()
    faulthandler.enable()  # a supervisor that ends this process with SIGABRT leaves its stacks on standard error
    if settings.is_open:
        log.warning("there is no TLS: keys cross the network readable", host=settings.host)
    import uvloop

    # Thousands of short-lived records a second and hardly a cycle among them: look for cycles rarely.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

    return uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    watchdog = Watchdog()
    watchdog.start()
    try:
        return await _serve_watched(settings)
    finally:
        watchdog.stop()


async def _serve_watched(settings: Settings) -> int:
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    node = Node(settings)
    await node.start()
    await node.db.warm_up()
    server = HttpServer(
        build(node),
        common=common_headers(settings),
        most=min(settings.connections, _room_for_connections()),
        trusted=node.edge.is_proxy,
    )
    try:
        with _signals(asyncio.get_running_loop(), node.leave.set):
            await _listen(server, settings, certificate)
            await node.leave.wait()
            node.gateway.end_polls()
            node.events.end_streams()
            node.tails.end_streams()
            await server.stop(_GRACE_SECONDS)
    finally:
        await node.stop()
        if certificate is not None:
            await certificate.stop()
    return int(node.retired)


async def _listen(server: HttpServer, settings: Settings, certificate: Certificate | None) -> None:
    try:
        if certificate is None:
            await server.start(settings.host, settings.port)
        else:
            certificate.start()
            await server.start(settings.host, settings.port, certificate.context)
    except OSError as error:
        raise SetupError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from error


def _room_for_connections() -> int:
    """How many files this process may have open, less those that it needs itself: who accepts more callers than that
    can neither answer them nor reach its database."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return max(10, most - _OWN_FILES) if most != resource.RLIM_INFINITY else sys.maxsize


class _signals:
    """SIGTERM and SIGINT call `leave`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
        self._loop, self._leave = loop, leave

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._leave)

    def __exit__(self, *_exc: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)


def migrate(settings: Settings, *, post: bool, say: migrations.Say) -> migrations.Migrated:
    """Bring the database's schema up to date."""
    return asyncio.run(migrations.migrate(_url(settings), post=post, say=say))


def migration_status(settings: Settings) -> migrations.Status:
    """What the database's schema has and lacks."""
    return asyncio.run(migrations.status(_url(settings)))


def restored(settings: Settings) -> restoration.Restored:
    """Let fences, workers and runs go on from a backup that was restored."""
    return asyncio.run(restoration.restored(_url(settings)))


def bootstrap(settings: Settings, known: dict[str, str]) -> dict[str, str]:
    """Migrate, and make sure there are a tenant `default`, a platform key and a worker key; answers both keys."""

    async def prepare() -> dict[str, str]:
        await (await connect_plain(_url(settings), _PATIENCE)).close()
        await migrations.migrate(_url(settings))
        db = Database(settings.database_url, size=2)
        await db.open()
        try:
            return await keys.found_cluster(db, MasterKeys.load(settings.master_key, settings.home), known)
        finally:
            await db.close()

    return asyncio.run(prepare())


def _url(settings: Settings) -> str:
    if not settings.database_url:
        raise SetupError("no database: set DATABASE_URL (or --database), or use `tocsin up`, which brings its own")
    return settings.database_url


def _check(settings: Settings) -> None:
    _url(settings)
    settings.refuse_open_doors()
