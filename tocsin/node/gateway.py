"""The worker gateway: register, claim, report, logs. It never decides; it gathers, calls the steps, and answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from tocsin.clock import EPOCH, iso, lease_margin
from tocsin.errors import ApiProblem, Conflict, InvalidInput, NotFound, PartitionMissing
from tocsin.flow import fleet, logs, parents
from tocsin.flow.keys import RunTokens
from tocsin.flow.note import Notebook
from tocsin.flow.report import Ending, Returned, attempt_of, claims_after, give_back, held
from tocsin.flow.shared.parcels import Parcels
from tocsin.flow.shared.specs import SpecBook, SpecKey, StoredSpec
from tocsin.flow.shared.transitions import Hint, Key, Stop
from tocsin.flow.tenants import http_allow
from tocsin.model.access import Identity
from tocsin.model.ids import parse_id
from tocsin.model.masks import Mask
from tocsin.model.retry import RetryBudgets
from tocsin.model.scalars import Instant
from tocsin.model.strict import untold
from tocsin.node.dispatcher import Dispatcher, Poll
from tocsin.node.ends import Ends, completed
from tocsin.node.group import GroupCommit
from tocsin.node.handover import Courier, can_be_told, complete
from tocsin.settings import Settings
from tocsin.store.db import Database, Row
from tocsin.store.objects import ObjectStore
from tocsin.telemetry import LOG_BACKLOG, RETRY_SHARE
from tocsin.wire import (
    Claim,
    ClaimAnswer,
    ClaimedRun,
    Completion,
    Finished,
    LogShipment,
    Notes,
    NotesAnswer,
    Register,
    Registered,
    Report,
    ReportAnswer,
    RunError,
    RunKey,
    StopOrder,
)

_LONGEST_WAIT = 60.0
_MOST_SLOTS = 10_000
_MOST_PLAIN = 200_000
_MOST_GIVEN_BACK = 1_000
_MOST_BACKLOG = 2**40
_FEW_SESSIONS, _LONG_GONE = 1_000, 10  # sessions before any is forgotten, and for how many leases it was not heard of
_STORAGE_PATIENCE = 0.25  # seconds that the answer to a claim waits for payloads
_COME_AGAIN = 1.0  # seconds until a run whose payload was late can be claimed again


@dataclass
class Session:
    """A worker, as this node knows it."""

    worker: fleet.Worker
    key_id: str
    renewed_at: float = float("-inf")
    last_claim: int = -1
    log_backlog: int = 0  # bytes of log lines that it has not got rid of, by its own word
    asked: int = 0  # the number of the last claim request
    state: str = "live"
    orders: list[StopOrder] = field(default_factory=list)
    poll: Poll | None = None
    listening: asyncio.Future[None] | None = None
    given_back: dict[RunKey, None] = field(default_factory=dict)  # the latest, because nothing else keeps them
    # A repeat that overtakes what it repeats would find the run gone before anybody remembers why.
    giving_back: asyncio.Lock = field(default_factory=asyncio.Lock)

    def recall(self, back: Sequence[Returned]) -> set[RunKey]:
        """Which of these it handed back before: a repeat is answered as it was then."""
        return {(r.run_id, r.fence) for r in back} & self.given_back.keys()

    def remember(self, keys: set[RunKey]) -> None:
        self.given_back.update(dict.fromkeys(keys))
        while len(self.given_back) > _MOST_GIVEN_BACK:
            del self.given_back[next(iter(self.given_back))]


class Gateway:
    """What workers speak to."""

    def __init__(
        self,
        db: Database,
        settings: Settings,
        dispatcher: Dispatcher,
        specs: SpecBook,
        tokens: RunTokens,
        courier: Courier,
        notes: Notebook,
        objects: ObjectStore,
        parcels: Parcels,
        hint: Callable[[Sequence[Hint]], None],
    ) -> None:
        self._db = db
        self._settings = settings
        self._dispatcher = dispatcher
        self._specs = specs
        self.tokens = tokens
        self._courier = courier
        self._notes = notes
        self._objects = objects
        self._hint = hint
        self._budgets = RetryBudgets()
        # A worker waits for two fifths of its lease, and it may be only one of several things that take time.
        self.ends = Ends(db, specs, parcels, self._budgets, hint, patience=settings.lease_seconds / 5)
        RETRY_SHARE.set_function(lambda: self._budgets.share)
        LOG_BACKLOG.set_function(self._log_backlog)
        self._sessions: dict[str, Session] = {}
        self._many = _FEW_SESSIONS
        self._leaving = False
        # Runs claimed here whose success ends nothing but themselves, with their fence. Forgetting one costs a look-up.
        self._plain: dict[str, int] = {}
        self._last_instant = EPOCH, iso(EPOCH)
        self._mark = 0  # a claim that was made, the latest that is known here; whoever hears of it asks after it
        self._renewals: GroupCommit[str, str | None] = GroupCommit(self._commit_renewals, 1000)

    # ── the four calls ───────────────────────────────────────────────────────────────────────────────────────────

    async def register(self, who: Identity, body: Register) -> Registered:
        """A new worker id and the terms of its lease."""
        worker = await fleet.register(self._db, who, body, self._settings.lease_seconds)
        self._keep(Session(worker, who.key_id, time.monotonic(), 0))
        return Registered(
            worker_id=worker.id,
            lease_seconds=self._settings.lease_seconds,
            heartbeat_seconds=self._settings.heartbeat_seconds,
        )

    async def claim(
        self, who: Identity, worker_id: str, body: Claim, gone: asyncio.Future[None], packed: bool
    ) -> ClaimAnswer | None:
        """Long-poll for runs; None if the worker hung up meanwhile (what was claimed for it is handed back)."""
        session = await self._session(who, worker_id)
        await self._check_lease(who, session)
        if 0 < body.number <= session.asked:  # it came before, or came late: its worker waits for another answer
            return ClaimAnswer(claim_id=0, runs=[], now=iso(self._db.clock.reached()), mark=self._mark)
        session.asked = max(session.asked, body.number)
        await self._take_back_lost(session, body)
        if session.orders or session.state != "live" or self._leaving:
            return self._answer_orders(session)
        if body.slots <= 0 and body.held <= 0:
            if body.listen:
                await self._listen(session, body, gone)
            return None if gone.done() else self._answer_orders(session)
        rows = await self._poll(session, body, gone)
        if gone.done():
            await self._hand_back(worker_id, rows)
            return None
        if not rows:
            return self._answer_orders(session)
        session.last_claim = max(row["claim_id"] for row in rows)
        self._mark = max(self._mark, session.last_claim)
        return await self._claim_answer(session, rows, body, packed)

    async def _poll(self, session: Session, body: Claim, gone: asyncio.Future[None]) -> list[Row]:
        lapses_at = session.renewed_at + self._settings.lease_seconds
        slots = max(0, min(body.slots, session.worker.slots, _MOST_SLOTS))
        held = max(0, min(body.held, session.worker.slots - slots, _MOST_SLOTS - slots))
        poll = session.poll = self._dispatcher.open_poll(
            session.worker, slots, lapses_at, ahead=body.ahead, held=held, held_for=body.held_for
        )
        either: set[asyncio.Future[Any]] = {poll.answer, gone}
        try:
            await asyncio.wait(either, timeout=_wait_of(body), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._dispatcher.close_poll(poll)
            session.poll = None
        rows = await poll.answer
        if poll.uncertain and not rows:
            # What the failed claim may have taken is found when the worker asks again.
            session.last_claim = -1
        return rows

    async def report(self, who: Identity, worker_id: str, body: Report) -> ReportAnswer:
        """Heartbeat, results, hand-backs and orders in one."""
        session = await self._session(who, worker_id)
        await self._renew(session)
        told = [(f.run_id, f.fence) for f in body.finished] + list(body.returned)
        accepted: set[RunKey] = set()
        postponed: Collection[RunKey] = ()
        if body.finished:
            done = await self.ends.add([Ending(worker_id, f, self._is_plain(f)) for f in body.finished])
            accepted, postponed = set(done.accepted), done.postponed
        if body.returned:
            back = [Returned(worker_id, r, f) for r, f in body.returned if parse_id(r) and 0 <= f < 2**63]
            async with session.giving_back:
                given = await self._give_back(back)
                accepted |= given | session.recall(back)
                session.remember(given)
        if told:
            self._dispatcher.look_for_room()
        if body.running is not None:
            await self._compare(session, body)
        session.log_backlog = min(max(body.log_backlog, 0), _MOST_BACKLOG)
        if body.leaving:
            await self._let_go(session)
        orders, session.orders = session.orders, []
        return ReportAnswer(
            accepted=told if accepted.issuperset(told) else [key for key in told if key in accepted],
            superseded=[key for key in told if key not in accepted and key not in postponed],
            stop=orders,
            drain=session.state == "draining",
            now=iso(self._db.clock.reached()),
            mark=self._mark,
        )

    def _log_backlog(self) -> int:
        """That of those who were heard of lately: nobody gets the lines of the others any more."""
        lately = time.monotonic() - self._settings.lease_seconds
        return sum(session.log_backlog for session in self._sessions.values() if session.renewed_at > lately)

    async def complete(self, who: Identity, body: Completion) -> list[Stop]:
        """End an attempt in its own words, told with its token; who is to be told that. A repeat changes nothing."""
        found = await attempt_of(self._db, who.tenant_id, who.key_id, who.fence)
        if found is None or found.outcome not in (None, body.outcome):
            raise _superseded()
        if found.outcome is not None:
            return []
        mask = await self._mask(found.run)
        done = await self.ends.add([Ending(found.worker_id, completed(who, found.attempt, body, mask))])
        if done.postponed:
            raise PartitionMissing("the end cannot be stored yet: try again in a moment", headers={"retry-after": "1"})
        if not done.accepted:
            raise _superseded()
        self._dispatcher.look_for_room()
        return [Stop(who.key_id, found.worker_id, who.fence, ended=True)]

    async def _mask(self, run: Row) -> Mask | None:
        """Ends that do not come through a worker have nobody else who would keep them discreet."""
        key = _spec_key(run)
        stored = (await self._specs.get([key])).get(key)
        return None if stored is None else await self._courier.mask(run, stored)

    async def ship_logs(self, who: Identity, worker_id: str, body: LogShipment) -> None:
        """Store log lines, those of a worker that is gone too: they may follow the ends that it has told."""
        try:
            await self._session(who, worker_id)
        except NotFound:
            if not await fleet.was_here(self._db, who, worker_id):
                raise
        await logs.ship(self._db, self._objects, worker_id, body.chunks)

    async def note(self, who: Identity, worker_id: str, body: Notes) -> NotesAnswer:
        """Keep what runs say of themselves."""
        await self._session(who, worker_id)
        return NotesAnswer(kept=await self._notes.keep(worker_id, body.notes))

    def stop(self, stops: Sequence[Stop]) -> None:
        """Pass stop orders on to workers of this node; a pending long poll ends so that they arrive at once."""
        for stop in stops:
            session = self._sessions.get(stop.worker_id)
            if session is not None:
                reason = "completed" if stop.ended else "cancelled"
                order = StopOrder(run_id=stop.run_id, fence=stop.fence, reason=reason, ended=stop.ended)
                session.orders.append(order)
                self._rouse(session)

    def drain(self, worker_ids: Sequence[str]) -> None:
        """The same with workers that are to take nothing more and go."""
        for worker_id in worker_ids:
            session = self._sessions.get(worker_id)
            if session is not None:
                session.state = "draining"
                self._rouse(session)

    def keys_inside(self) -> set[str]:
        """With which keys workers wait for an answer."""
        return {s.key_id for s in self._sessions.values() if s.poll is not None or s.listening is not None}

    def show_out(self, key_ids: Collection[str]) -> None:
        """Answer the long polls of these keys: the next one is refused."""
        for session in self._sessions.values():
            if session.key_id in key_ids:
                self._rouse(session)

    def end_polls(self) -> None:
        """Answer every long poll, those that are open and those still to come: the node is going."""
        self._leaving = True
        for session in self._sessions.values():
            self._rouse(session)

    def _rouse(self, session: Session) -> None:
        """End the worker's long poll: there is something to tell."""
        if session.poll is not None:
            self._dispatcher.close_poll(session.poll)
        if session.listening is not None and not session.listening.done():
            session.listening.set_result(None)

    async def _listen(self, session: Session, body: Claim, gone: asyncio.Future[None]) -> None:
        """Without a free slot: until there are orders."""
        roused = session.listening = asyncio.get_running_loop().create_future()
        await asyncio.wait((roused, gone), timeout=_wait_of(body), return_when=asyncio.FIRST_COMPLETED)
        if session.listening is roused:
            session.listening = None

    # ── sessions and leases ──────────────────────────────────────────────────────────────────────────────────────

    async def _session(self, who: Identity, worker_id: str) -> Session:
        session = self._sessions.get(worker_id)
        if session is None:
            worker = await fleet.find(self._db, who, worker_id)
            if worker is None:
                raise _unknown_worker()
            session = self._keep(Session(worker, who.key_id, state=worker.state))
        if session.key_id != who.key_id:
            raise _unknown_worker()
        return session

    def _keep(self, session: Session) -> Session:
        """Know a worker from now on. Those that went without a word are forgotten whenever there are twice as many;
        should one of them come back, the database knows it."""
        if len(self._sessions) >= self._many:
            long_ago = time.monotonic() - _LONG_GONE * self._settings.lease_seconds
            self._sessions = {id_: each for id_, each in self._sessions.items() if each.renewed_at > long_ago}
            self._many = max(_FEW_SESSIONS, 2 * len(self._sessions))
        self._sessions[session.worker.id] = session
        return session

    async def _check_lease(self, who: Identity, session: Session) -> None:
        """As far as this node knows the lease is over: ask the database, for it may have been renewed elsewhere."""
        if time.monotonic() - session.renewed_at < self._settings.lease_seconds:
            return
        asked_at = time.monotonic()
        worker = await fleet.find(self._db, who, session.worker.id)
        if worker is None or worker.lease_left <= 0:
            self._sessions.pop(session.worker.id, None)
            raise _unknown_worker()
        # Never more than a whole lease: one that seems longer was given before the database's clock was set back.
        worn = max(0.0, self._settings.lease_seconds - worker.lease_left)
        session.renewed_at, session.state = asked_at - worn, worker.state

    async def _renew(self, session: Session) -> None:
        # A worker counts its lease from when it sent the report, and ends it early by a margin. For a part of that the
        # last renewal still covers the report; the rest of the margin is for killing.
        if time.monotonic() - session.renewed_at < lease_margin(self._settings.lease_seconds) / 4:
            return
        started = time.monotonic()
        state = await self._renewals.add(session.worker.id)
        if state is None:
            self._sessions.pop(session.worker.id, None)
            raise _unknown_worker()
        session.renewed_at, session.state = started, state
        if session.poll is not None:
            session.poll.lapses_at = started + self._settings.lease_seconds

    async def _commit_renewals(self, worker_ids: Sequence[str]) -> list[str | None]:
        renewed = await fleet.renew(self._db, worker_ids, self._settings.lease_seconds)
        self._mark = max(self._mark, renewed.last_claim)
        return [renewed.states.get(worker_id) for worker_id in worker_ids]

    # ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _take_back_lost(self, session: Session, body: Claim) -> None:
        """Asking again without knowing the last answer proves that the answer was lost; unless the request itself is
        older than that answer, and only came late. What is not proved yet is looked at next time."""
        if session.last_claim in (0, body.last_claim):
            return
        heard = _instant(body.heard)
        lost = await claims_after(self._db, session.worker.id, body.last_claim, heard, body.marked)
        if lost:
            await self._give_back(lost)
        if lost or heard is None:
            session.last_claim = body.last_claim

    async def _let_go(self, session: Session) -> None:
        """The worker's last word is that it has nothing: what it should have, it never got."""
        lost = await claims_after(self._db, session.worker.id, -1)
        if lost:
            await self._give_back(lost)
        await fleet.leave(self._db, session.worker.id)
        self._sessions.pop(session.worker.id, None)

    async def _hand_back(self, worker_id: str, rows: Sequence[Row]) -> None:
        if rows:
            await self._give_back([Returned(worker_id, row["id"], row["fence"]) for row in rows])

    async def _put_off(self, session: Session, rows: list[Row], late: Collection[str]) -> list[Row]:
        """Hand back runs whose payload did not arrive in time, and return the other runs. The reads continue."""
        worker_id = session.worker.id
        await self._give_back(
            [Returned(worker_id, row["id"], row["fence"], _COME_AGAIN) for row in rows if row["id"] in late]
        )
        return [row for row in rows if row["id"] not in late]

    async def _give_back(self, returned: list[Returned]) -> set[RunKey]:
        done = await give_back(self._db, returned)
        self._hint(done.hints)
        return done.accepted

    def _answer_orders(self, session: Session) -> ClaimAnswer:
        orders, session.orders = session.orders, []
        return ClaimAnswer(
            claim_id=max(session.last_claim, 0),
            runs=[],
            now=iso(self._db.clock.reached()),
            mark=self._mark,
            stop=orders,
            drain=session.state == "draining",
        )

    async def _claim_answer(self, session: Session, rows: list[Row], body: Claim, packed: bool) -> ClaimAnswer:
        shared, claimed_at = body.shared_specs, rows[0]["claimed_at"]
        if len(self._plain) > _MOST_PLAIN:
            self._plain.clear()
        self._plain.update((row["id"], row["fence"]) for row in rows if not row["special"])
        first = ((row["tenant_id"], row["job_id"]) for row in rows if row["attempt"] == 1)
        self._budgets.started(first, len(rows), time.monotonic())
        known = await self._specs.get({_spec_key(row) for row in rows})
        by_url = body.content_urls and shared
        handed = await self._courier.fetch(rows, known, body.payload_urls, by_url, patience=_STORAGE_PATIENCE)
        if handed.late:
            rows = await self._put_off(session, rows, handed.late)
            known = {key: stored for key, stored in known.items() if key in set(map(_spec_key, rows))}
        known |= handed.specs
        refused = {run_id: why for run_id, why in handed.refused.items() if run_id not in handed.late}
        if packed and not all(stored.packs for stored in known.values()):
            refused |= {row["id"]: untold() for row in rows if not known[_spec_key(row)].packs}
            known = {key: stored for key, stored in known.items() if stored.packs}
        if refused:
            await self._refuse(session, rows, refused)
            rows = [row for row in rows if row["id"] not in refused]
        runs = [self._claimed_run(row, known[_spec_key(row)], shared, packed) for row in rows]
        if handed.given:
            complete(runs, handed.given)
        if any(stored.kind == "http" for stored in known.values()):
            await self._let_call(runs, rows)
        if any(row["has_parents"] for row in rows):
            await self._tell_parents(runs, rows)
        orders, session.orders = session.orders, []
        return ClaimAnswer(
            claim_id=session.last_claim,
            runs=runs,
            now=iso(max(self._db.clock.reached(), claimed_at)),
            mark=self._mark,
            specs=_shared_specs(known, packed) if shared else {},
            contents={_spec_ref(key): parts for key, parts in handed.contents.items() if key in known},
            stop=orders,
            drain=session.state == "draining",
        )

    async def without_untold(self, worker_id: str, answer: ClaimAnswer) -> ClaimAnswer:
        """The same answer without runs that cannot be told: they end, and keep nobody else's from their worker."""
        odd = {run.run_id: run for run in answer.runs if not can_be_told(run)}
        ends = [(run.run_id, run.attempt, run.fence, run.tenant, untold()) for run in odd.values()]
        await self._end_unbegun(worker_id, ends)
        answer.runs = [run for run in answer.runs if run.run_id not in odd]
        return answer

    async def _refuse(self, session: Session, rows: Sequence[Row], why: Mapping[str, ApiProblem]) -> None:
        ends = [
            (row["id"], row["attempt"], row["fence"], row["tenant_id"], why[row["id"]])
            for row in rows
            if row["id"] in why
        ]
        await self._end_unbegun(session.worker.id, ends)

    async def _end_unbegun(self, worker_id: str, runs: Sequence[tuple[str, int, int, int, ApiProblem]]) -> None:
        """End attempts that cannot begin, in the worker's place: no worker needs to know how to."""
        ends = [
            Finished(
                run_id=run_id,
                attempt=attempt,
                fence=fence,
                tenant=tenant,
                outcome="failed",
                error=RunError(class_=problem.code, message=problem.detail),
                give_up=isinstance(problem, InvalidInput),
            )
            for run_id, attempt, fence, tenant, problem in runs
        ]
        await self.ends.add([Ending(worker_id, end, self._is_plain(end)) for end in ends])

    def _claimed_run(self, row: Row, stored: StoredSpec, shared: bool, packed: bool) -> ClaimedRun:
        run_id, fence = row["id"], row["fence"]
        return ClaimedRun(
            run_id=run_id,
            attempt=row["attempt"],
            fence=fence,
            tenant=row["tenant_id"],
            start_at=self._iso(row["ready_at"]),
            timeout_ms=stored.timeout_ms,
            job_id=row["job_id"],
            job_name=stored.name,
            scheduled_for=self._iso(row["scheduled_for"]),
            logical_at=None if row["logical_at"] is None else iso(row["logical_at"]),
            spec=None if shared else stored.msgpack if packed else stored.json,
            spec_ref=_spec_ref((0, row["job_id"], row["job_version"])) if shared else None,
            args=None if row["args"] is None else msgspec.json.decode(row["args"]),
            token=self.tokens.make(row["tenant_id"], run_id, fence),
        )

    async def _tell_parents(self, runs: Sequence[ClaimedRun], rows: Sequence[Row]) -> None:
        """Tell runs how those ended that they waited for, or where they are told."""
        found = await parents.handed_over(self._db, [Key(r["tenant_id"], r["id"]) for r in rows if r["has_parents"]])
        for run in runs:
            if run.run_id in found:
                run.parents = found[run.run_id]
                if run.parents is None:
                    run.parents_url = f"/v1/runs/{run.run_id}/parents"

    async def _let_call(self, runs: Sequence[ClaimedRun], rows: Sequence[Row]) -> None:
        """Tell runs whom within our walls they may call; those that are not of kind `http` make nothing of it."""
        lists = await http_allow(self._db, {row["tenant_id"] for row in rows})
        for run, row in zip(runs, rows, strict=True):
            run.http_allow = lists.get(row["tenant_id"], [])

    def _iso(self, at: datetime) -> str:
        """Runs of one batch are due at one instant: say it once."""
        if at != self._last_instant[0]:
            self._last_instant = at, iso(at)
        return self._last_instant[1]

    def _is_plain(self, finished: Finished) -> bool:
        return self._plain.pop(finished.run_id, None) == finished.fence and finished.outcome == "succeeded"

    # ── heartbeats ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _compare(self, session: Session, body: Report) -> None:
        """A heartbeat lists what the worker has: find stop orders it missed, runs it never got or has dropped, and runs
        that have ended without it."""
        running = body.running or []
        has = {run_id for run_id, _ in running}
        told = {f.run_id for f in body.finished} | {run_id for run_id, _ in body.returned}
        known = {order.run_id for order in session.orders}
        dropped = []
        book = await held(self._db, session.worker.id, _instant(body.asked), body.marked)
        for run in book:
            if run.id in has:
                if run.state == "stopping" and run.id not in known:
                    session.orders.append(StopOrder(run_id=run.id, fence=run.fence, reason=run.stop_reason))
            elif run.id not in told and (run.claim_id <= body.last_claim or run.claimed_before):
                dropped.append(Returned(session.worker.id, run.id, run.fence))
        if dropped:
            await self._give_back(dropped)
        for run_id, fence in set(running) - {(run.id, run.fence) for run in book}:
            if run_id not in told and run_id not in known:
                session.orders.append(StopOrder(run_id=run_id, fence=fence, reason="ended", ended=True))


def _shared_specs(known: dict[SpecKey, StoredSpec], packed: bool) -> dict[str, msgspec.Raw]:
    return {_spec_ref(key): stored.msgpack if packed else stored.json for key, stored in known.items()}


def _spec_key(run: Row) -> SpecKey:
    return run["tenant_id"], run["job_id"], run["job_version"]


def _spec_ref(key: SpecKey) -> str:
    return f"{key[1]}:{key[2]}"


def _wait_of(body: Claim) -> float:
    return min(max(body.wait, 0.0), _LONGEST_WAIT)


def _instant(text: str) -> datetime | None:
    """A `now` of ours that a worker repeats; None if it does not."""
    with contextlib.suppress(ValueError):
        return Instant.parse(text).at
    return None


def _superseded() -> Conflict:
    return Conflict("this attempt has ended, or another has taken its place", code="superseded")


def _unknown_worker() -> NotFound:
    return NotFound("this worker is not known, or its lease is over: register anew", code="unknown_worker")
