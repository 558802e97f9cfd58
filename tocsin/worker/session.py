"""One registration's life: claim, start, report, until the lease is over or the work is drained.

All that is known of runs lives here and ends with the session, because a new worker id owns none of the old one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from tocsin import wire
from tocsin.clock import boottime
from tocsin.errors import TocsinError
from tocsin.model.loglines import from_outside
from tocsin.telemetry import get_logger
from tocsin.wire import ClaimedRun, Finished, LogLine, RunKey
from tocsin.worker.ends import not_begun, outgoing, reportable
from tocsin.worker.executors import Answer, Attempt, Executor, Why
from tocsin.worker.fetching import Fetching, spec_of
from tocsin.worker.frames import Note
from tocsin.worker.link import Link, UnknownWorker, Unreachable
from tocsin.worker.logs import LogShipper, RunLog
from tocsin.worker.notes import NoteShipper
from tocsin.worker.targets import Spec, read_spec
from tocsin.worker.timing import Lease, ServerClock, instant

log = get_logger("worker")

CLAIM_WAIT = 20.0
_LEASE_CHECK = 0.1
_SHORTEST_OFFER = 0.05  # seconds that a claim waits at least, when more slots are about to come free
_GIVES_WAY = 0.01  # a run that goes to its executor sooner than this does not give way any more
_REPORT_RESULTS = 5000
_REPORT_BYTES = 1024 * 1024
_LISTEN_AFTER = 0.25  # with all slots taken for so long, a long poll is opened for orders alone
LAST_WORDS = 10.0  # how long a drained worker tries to get its last report through


class LeaseOver(TocsinError):
    """We could not report in time; our runs may be somebody else's by now."""


class Drain:
    """The wish to stop, from a signal or from the server. A second wish means: now."""

    def __init__(self, grace: float = 10.0) -> None:
        self.wanted = asyncio.Event()
        self.now = asyncio.Event()
        self.grace = grace

    def ask(self) -> None:
        if self.wanted.is_set():
            self.now.set()
        self.wanted.set()


class Session:
    """A worker id and everything it has in hand. It is the `Sink` of the executors."""

    def __init__(
        self,
        link: Link,
        registered: wire.Registered,
        executors: dict[str, Executor],
        slots: int,
        drain: Drain,
        lease: Lease,
        strike: Callable[[], object],
        spooled: int,
    ) -> None:
        self.worker_id = registered.worker_id
        self._link, self._executors, self._slots, self._drain = link, executors, slots, drain
        self._heartbeat = registered.heartbeat_seconds
        self._lease, self._strike = lease, strike
        self._timeout = lease.seconds * 0.4
        self._clock = ServerClock()
        self.logs = LogShipper(link, self.worker_id, spooled)
        self._notes = NoteShipper(link, self.worker_id, self.check_lease)
        self._live: dict[RunKey, Attempt] = {}  # received, and not yet part of a report
        self._held: list[tuple[float, int, Attempt]] = []
        self._serial = itertools.count()
        self._held_timer: asyncio.TimerHandle | None = None
        self._busy = 0
        self._finished: list[Finished] = []
        self._returned: list[RunKey] = []
        self._unanswered = 0
        self._max_unreported = max(5000, 4 * slots)
        self._last_claim = 0
        self._numbers = itertools.count(1)
        self._heard = self._asked = ""
        self._marked = self._asked_mark = 0
        self._answered = asyncio.Event()
        self._may_claim = asyncio.Event()
        self._to_report = asyncio.Event()
        self._idle = asyncio.Event()
        self._settled = asyncio.Event()
        self._broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()  # fails with a bug of ours
        self._fetching = Fetching(link, self._arrived, self._broken)

    async def run(self) -> None:
        """Returns when drained; raises `LeaseOver`, `UnknownWorker` or `Refused`. Log lines that wait by then go on
        trying, until whoever called this takes them over or stops them."""
        for executor in self._executors.values():
            executor.serve(self)
        await self._report(heartbeat=True)
        claims = asyncio.ensure_future(self._claims())
        loops = [claims, *map(_task, (self._reports(), self._guard_lease(), self._notes.run()))]
        ending = asyncio.ensure_future(self._drain_when_asked(claims))
        try:
            waiting = {ending, self.logs.start(), self._broken, *loops}
            while ending in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {claims}:
                    task.result()
                if claims in done and not claims.cancelled():
                    claims.result()
        finally:
            if self._lease.over:  # before anything else: every moment counts
                self._strike()
            self._broken.cancel()
            self._fetching.drop_all()
            await _cancel(ending, *loops)
            if self._held_timer is not None:
                self._held_timer.cancel()

    # ── claiming ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _claims(self) -> None:
        failures = 0
        while True:
            try:
                if (wanted := self._wanted()) is not None:
                    await self._claim(wanted)
                elif not await self._room(_LISTEN_AFTER):
                    await self._listen()
                failures = 0
            except Unreachable as exc:
                failures += 1
                log.warning("claim failed", why=str(exc), failures=failures)
                await asyncio.sleep(_back_off(failures, 5.0))
                await self._hear()

    async def _room(self, within: float | None = None) -> bool:
        """Until there is room for a run; False if there is none by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._wanted() is None:
                    self._may_claim.clear()
                    await self._may_claim.wait()
                return True
        return False

    async def _listen(self) -> None:
        """All slots are taken: wait for orders, which else would come with the next heartbeat, or for room."""
        body = wire.Claim(slots=0, listen=True, last_claim=self._last_claim, wait=CLAIM_WAIT, shared_specs=True)
        waits = [_task(self._claim(body)), _task(self._room())]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(*waits)
        if waits[0] in done:
            waits[0].result()

    async def _hear(self) -> None:
        """The answer of a claim may have been lost. The next one proves that only if we have heard from the server
        since, so speak to it first."""
        self._answered.clear()
        self._to_report.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._answered.wait(), self._heartbeat)

    def _hear_of(self, answer: wire.ClaimAnswer | wire.ReportAnswer) -> None:
        self._heard, self._marked = max(self._heard, answer.now), max(self._marked, answer.mark)

    async def _claim(self, body: wire.Claim) -> None:
        body.number, body.heard, body.marked = next(self._numbers), self._heard, self._marked
        self._asked, self._asked_mark = self._heard, self._marked
        sent = time.monotonic()
        request = asyncio.ensure_future(self._link.claim(self.worker_id, body))
        try:
            answer = await asyncio.shield(request)
        except asyncio.CancelledError:
            # An answer that has come all the same while we drain is not lost: its runs are handed back. Without a
            # lease they are somebody else's, and nothing of them may be begun.
            if self._drain.wanted.is_set() and not self._lease.over and request.done() and not request.exception():
                self._take(request.result())
            request.cancel()
            raise
        self.check_lease()
        if answer.now:
            self._clock.observe(answer.now, sent, time.monotonic())
            self._hear_of(answer)
        self._take(answer)

    def _wanted(self) -> wire.Claim | None:
        """What to ask for; None if there is no room. A run that waits for its instant gives way to something due, so
        its slot is offered, too, until the first of them starts."""
        if len(self._finished) + self._unanswered >= self._max_unreported:
            return None
        free = self._free
        held_for = self._held[0][0] - time.monotonic() - _GIVES_WAY if self._held else 0.0
        held = len(self._held) if held_for > 0 else 0
        if free <= 0 and not held:
            return None
        return wire.Claim(
            slots=max(free, 0),
            ahead=True,
            held=held,
            held_for=held_for if held else 0.0,
            last_claim=self._last_claim,
            wait=self._offer_stands(free, held_for),
            shared_specs=True,
            payload_urls=True,
            content_urls=True,
        )

    def _offer_stands(self, free: int, held_for: float) -> float:
        """For how long to wait for an answer. Who has fewer free slots than runs that wait for their instant offers
        more soon: when half of the time is over in which those start."""
        if free <= 0:
            return min(held_for, CLAIM_WAIT)
        if free >= len(self._held):
            return CLAIM_WAIT
        last = max(self._held)[0] - time.monotonic()
        return min(max(last / 2, _SHORTEST_OFFER), CLAIM_WAIT)

    def _take(self, answer: wire.ClaimAnswer) -> None:
        self._last_claim = max(self._last_claim, answer.claim_id)
        specs = {ref: read_spec(raw) for ref, raw in answer.specs.items() if ref not in answer.contents}
        whole = self._fetching.begin(answer, specs)
        due = self._take_in([(run, spec_of(run, specs)) for run in whole])
        self._settled.clear()
        self._changed()
        self._obey(answer.stop, answer.drain)
        self._start_due(due)

    def _arrived(self, run: ClaimedRun, spec: Spec | str) -> None:
        """Take in a run whose missing parts have all arrived, or cannot arrive."""
        if self._lease.over:  # the server has given the run to another worker
            return
        due = self._take_in([(run, spec)])
        self._changed()
        self._start_due(due)

    def _take_in(self, runs: Sequence[tuple[ClaimedRun, Spec | str]]) -> dict[Executor, list[Attempt]]:
        """Record runs, as far as slots are free. Return the attempts that must start now, by executor."""
        received, server_now = time.monotonic_ns(), self._clock.now()
        due: dict[Executor, list[Attempt]] = {}
        for run, spec in runs:
            if (run.run_id, run.fence) in self._live:
                continue
            start_at = instant(run.start_at)
            is_due = start_at <= server_now
            if self._free <= 0 and not (is_due and self._make_way()):  # more runs than the worker asked for
                self._returned.append((run.run_id, run.fence))
                continue
            try:
                attempt = self._admit(run, spec, received)
            except Exception as exc:  # unusual data of one run must not keep the worker from the others
                log.error("a run cannot be taken in", run=run.run_id, why=type(exc).__name__)
                self._finished.append(not_begun(run, "failed", f"the worker cannot take it in: {type(exc).__name__}"))
                continue
            if attempt is None:
                continue
            if is_due or self._drain.wanted.is_set():
                due.setdefault(attempt.executor, []).append(attempt)
            else:
                self._hold(attempt, start_at)
        return due

    def _start_due(self, due: dict[Executor, list[Attempt]]) -> None:
        if self._drain.wanted.is_set():
            self.handed_back([attempt for group in due.values() for attempt in group])
            return
        for executor, attempts in due.items():
            executor.start(attempts)

    @property
    def _free(self) -> int:
        """Return the number of free slots: not used by a run that runs, waits for its instant or is being fetched."""
        return self._slots - self._busy - len(self._fetching)

    def _admit(self, run: ClaimedRun, spec: Spec | str, received: int) -> Attempt | None:
        """Put a run on the books; one that nobody here can execute ends at once."""
        known = None if isinstance(spec, str) else spec
        executor = self._executors.get(known.kind) if known else None
        attempt = Attempt(run, known, executor or next(iter(self._executors.values())), received)
        self._live[attempt.key] = attempt
        self._busy += 1
        if executor is not None:
            return attempt
        why = f"this worker does not run targets of kind {known.kind}" if known else str(spec)
        self.ended([(attempt, attempt.finished("failed", error_class="start", message=why))])
        return None

    def _make_way(self) -> bool:
        """Hand back the run whose instant is furthest away; False if none waits."""
        if not self._held:
            return False
        last = max(self._held)[2]
        self._unhold({last})
        self.handed_back([last])
        return True

    def _hold(self, attempt: Attempt, start_at: float) -> None:
        start = self._clock.monotonic_of(start_at)
        attempt.start_ns = int(start * 1e9) + 1
        entry = (start - attempt.executor.head_start, next(self._serial), attempt)
        heapq.heappush(self._held, entry)
        if self._held[0] is entry:
            self._set_held_timer()

    def _set_held_timer(self) -> None:
        if self._held_timer is not None:
            self._held_timer.cancel()
        self._held_timer = None
        if self._held:
            delay = max(self._held[0][0] - time.monotonic(), 0)
            self._held_timer = asyncio.get_running_loop().call_later(delay, self._start_held)

    def _start_held(self) -> None:
        due: dict[Executor, list[Attempt]] = {}
        while self._held and self._held[0][0] <= time.monotonic():
            attempt = heapq.heappop(self._held)[2]
            due.setdefault(attempt.executor, []).append(attempt)
        if due and self._lease.over:  # woken after a long sleep: the lease guard takes it from here
            return
        try:
            for executor, attempts in due.items():
                executor.start(attempts)
        except Exception as exc:  # the event loop would only log it, and the runs would never end
            if not self._broken.done():
                self._broken.set_exception(exc)
        self._may_claim.set()
        self._set_held_timer()

    # ── what executors say ───────────────────────────────────────────────────────────────────────────────────────

    def ended(self, ends: Iterable[tuple[Attempt, Finished]]) -> None:
        live, finished = self._live, self._finished
        for attempt, end in ends:
            self._busy -= 1
            end = outgoing(attempt, end)
            if attempt.log is None:
                del live[attempt.key]
                if not attempt.over:
                    finished.append(end)
            else:
                self.logs.close(attempt.log, _AfterLog(self, attempt, end))
        self._changed()

    def after_log(self, attempt: Attempt, end: Finished) -> None:
        """The attempt's lines have arrived, or are not waited for any longer."""
        end.log = attempt.log.summary()
        del self._live[attempt.key]
        if not attempt.over:
            self._finished.append(end)
        self._changed()

    def handed_back(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self._busy -= 1
            del self._live[attempt.key]
            self._returned.append(attempt.key)
        self._changed()

    def output(self, attempt: Attempt, lines: list[LogLine], dropped: int = 0) -> None:
        if attempt.log is None:
            attempt.log = RunLog(attempt.run)
        self.logs.add(attempt.log, attempt.mask.output(lines), dropped)

    def note(self, attempt: Attempt, note: Note, answer: Answer | None) -> None:
        self._notes.add(attempt.key, note, answer)

    def _changed(self) -> None:
        self._may_claim.set()
        if self._finished or self._returned:
            self._to_report.set()
        if not self._busy:
            self._idle.set()
        else:
            self._idle.clear()

    # ── reporting ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _reports(self) -> None:
        next_heartbeat = time.monotonic() + self._heartbeat
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._to_report.wait(), max(next_heartbeat - time.monotonic(), 0))
            self._to_report.clear()
            heartbeat = time.monotonic() >= next_heartbeat
            if heartbeat:
                next_heartbeat = time.monotonic() + self._heartbeat
            await self._report(heartbeat)

    async def _report(self, heartbeat: bool) -> None:
        """Send one report until it is answered, unchanged, because an exact repeat is answered alike."""
        finished = self._portion()
        returned, self._returned = self._returned, []
        self._unanswered = len(finished)
        answer = await self._deliver(self._encoded(finished, returned, heartbeat))
        self._unanswered = 0
        settled = {*answer.accepted, *answer.superseded}
        unsettled = [end for end in finished if (end.run_id, end.fence) not in settled]
        if unsettled:
            log.warning("results neither accepted nor superseded", count=len(unsettled))
            self._finished[:0] = unsettled
            await asyncio.sleep(_back_off(3, 1.0))
        self._may_claim.set()
        if not (self._live or self._finished or self._returned):
            self._settled.set()
        if self._finished or self._returned:
            self._to_report.set()
        self._obey(answer.stop, answer.drain)

    def _encoded(self, finished: list[Finished], returned: list[RunKey], heartbeat: bool) -> bytes:
        """Encode a report. An end that cannot be encoded is replaced in `finished`: this affects only its own run, not
        the worker or the other ends."""
        report = wire.Report(
            last_claim=self._last_claim,
            asked=self._asked,
            marked=self._asked_mark,
            running=self._in_hand() if heartbeat else None,
            returned=returned,
            finished=finished,
            free={"slots": max(self._free, 0)},
            log_backlog=self.logs.backlog,
        )
        try:
            return wire.encode_msgpack(report)
        except Exception as exc:
            log.error("a report cannot be encoded", why=from_outside(f"{type(exc).__name__}: {exc}"))
            finished[:] = [reportable(end) for end in finished]
            return wire.encode_msgpack(report)

    def _portion(self) -> list[Finished]:
        """Results for one report: a body that is too large would be refused, again and again."""
        size = count = 0
        for end in self._finished:
            if count == _REPORT_RESULTS or size > _REPORT_BYTES:
                break
            count += 1
            if end.error is not None:
                size += len(end.error.message)
            if end.result is not None:
                size += len(end.result)
        portion, self._finished = self._finished[:count], self._finished[count:]
        return portion

    def _in_hand(self) -> list[RunKey]:
        """Every run that the server must not think we lack."""
        return [*self._live, *self._fetching.keys, *((end.run_id, end.fence) for end in self._finished)]

    async def _deliver(self, body: bytes) -> wire.ReportAnswer:
        for failures in itertools.count(1):
            self.check_lease()
            sent, sent_monotonic = boottime(), time.monotonic()
            try:
                answer = await self._link.report(self.worker_id, body, self._timeout)
            except Unreachable as exc:
                log.warning("report failed", why=str(exc), failures=failures)
                await asyncio.sleep(_back_off(failures, 1.0))
                continue
            self._lease.renew(sent)
            self.check_lease()
            self._clock.observe(answer.now, sent_monotonic, time.monotonic())
            self._hear_of(answer)
            self._answered.set()
            return answer
        raise AssertionError

    def check_lease(self) -> None:
        """Nothing may be said or begun once the lease is over."""
        if self._lease.over:
            raise LeaseOver(f"no report was answered for {self._lease.seconds:g} s")

    async def _guard_lease(self) -> None:
        while True:
            self.check_lease()
            await asyncio.sleep(min(max(self._lease.remaining, 0.001), _LEASE_CHECK))

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _obey(self, stops: list[wire.StopOrder], drain: bool) -> None:
        for order in stops:
            attempt = self._live.get((order.run_id, order.fence))
            if attempt is not None:
                attempt.over = attempt.over or order.ended
                self._stop(attempt)
            elif (run := self._fetching.drop((order.run_id, order.fence))) is not None and not order.ended:
                self._finished.append(not_begun(run, "cancelled"))
                self._changed()
        if drain and not self._drain.wanted.is_set():
            log.info("the server asks to drain")
            self._drain.ask()

    def _stop(self, attempt: Attempt) -> None:
        if self._unhold({attempt}):
            self.ended([(attempt, attempt.finished("cancelled"))])
        else:
            attempt.executor.stop(attempt)

    def _unhold(self, attempts: set[Attempt]) -> bool:
        """Take attempts out of those that wait for their instant; whether any was there."""
        kept = [entry for entry in self._held if entry[2] not in attempts]
        if len(kept) == len(self._held):
            return False
        heapq.heapify(kept)
        self._held = kept
        self._set_held_timer()
        return True

    async def _drain_when_asked(self, claims: asyncio.Task[None]) -> None:
        """Stop claiming, hand back what waits, let what runs end, kill what does not, report it all."""
        await self._drain.wanted.wait()
        await _cancel(claims)
        with contextlib.suppress(Unreachable, TimeoutError):
            # The closed poll's answer may be lost on its way; a later request that lacks it is the proof.
            await self._hear()
            look = wire.Claim(slots=0, last_claim=self._last_claim, wait=0.0, shared_specs=True)
            await asyncio.wait_for(self._claim(look), 1.0)
        held = {entry[2] for entry in self._held}
        self._unhold(held)
        self.handed_back(held)
        self._returned += self._fetching.drop_all()
        self._changed()
        if self._busy:
            log.info("waiting for running runs", count=self._busy)
            waits = [_task(self._idle.wait()), _task(self._drain.now.wait())]
            await asyncio.wait(waits, timeout=self._drain.grace, return_when=asyncio.FIRST_COMPLETED)
            await _cancel(*waits)
        grace = "at once" if self._drain.now.is_set() else f"after a grace of {self._drain.grace:g} s"
        for executor in self._executors.values():
            await executor.kill_all(Why("drained", f"its worker was drained; it was killed {grace}"))
        if self._live or self._finished or self._returned or self._unanswered:
            self._settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), LAST_WORDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.logs.all_arrived.wait(), LAST_WORDS)
        if not (self._live or self._finished or self._returned or self._unanswered):
            await self._take_leave()

    async def _take_leave(self) -> None:
        """Say that we have nothing and go, so that nobody waits for our lease to end. If that is lost, they do."""
        body = wire.encode_msgpack(wire.Report(last_claim=self._last_claim, leaving=True))
        with contextlib.suppress(Unreachable, UnknownWorker, TimeoutError):
            await asyncio.wait_for(self._link.report(self.worker_id, body, 1.0), 1.0)


class _AfterLog:
    """Called when an attempt's log has arrived."""

    __slots__ = ("_attempt", "_end", "_session")

    def __init__(self, session: Session, attempt: Attempt, end: Finished) -> None:
        self._session, self._attempt, self._end = session, attempt, end

    def __call__(self) -> None:
        self._session.after_log(self._attempt, self._end)


def _back_off(failures: int, most: float) -> float:
    return random.uniform(0.5, 1.0) * min(0.05 * 2.0**failures, most)


def _task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(work)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
