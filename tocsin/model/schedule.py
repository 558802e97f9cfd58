"""When a job owes an occurrence: each kind of schedule as a `Timetable`, what is refused, and what it says in words.

A timetable is composed: what the kind names, narrowed to `starting_at` … `until`. Whatever else narrows or moves
instants wraps it in the same way (`Within` shows how), so that the steps never see which kind they plan. `jitter` is no
part of it: an occurrence stands for its nominal instant and is only begun a little later (`spread`).

`anchor` is when the job was made, or last given another beginning; `seed` names the job for ever ("tenant/name").
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime, timedelta

import msgspec

from tocsin.clock import EPOCH, iso
from tocsin.errors import InvalidInput
from tocsin.model import cron, interval, phrases, rrule, words
from tocsin.model.calendars import MOST_MOVED, Calendar
from tocsin.model.job import LONGEST_DELAY, ONCE_KINDS, Misfire, Schedule
from tocsin.model.localdays import FARTHEST_YEARS, LocalDays, OneTime
from tocsin.model.misfire import minus
from tocsin.model.scalars import Duration, Instant, encode_scalar
from tocsin.model.timetable import TICK, Cron, Every, Never, Once, Timetable, Within, within
from tocsin.model.zones import zone

SHORTEST_EVERY = timedelta(seconds=1)
LONGEST_JITTER = timedelta(days=1)
_SECOND = timedelta(seconds=1)
_HASHED = re.compile(r"(?<![A-Z])H(?![A-Z])")


def seed_of(tenant: str, name: str | None, job_id: str) -> str:
    """What a job's `H` and jitter follow from."""
    return f"{tenant}/{name or job_id}"


def timetable(
    schedule: Schedule | None, anchor: datetime, seed: str = "", calendar: Calendar | None = None
) -> Timetable:
    """The instants a checked schedule owes, as the calendar that it names leaves them."""
    if schedule is None:
        return Once(anchor)
    if schedule.text is not None:
        schedule = understood(schedule, anchor)
    if schedule.at is not None:
        return Once(schedule.at.at)
    if schedule.delay is not None:
        return Once(anchor + schedule.delay.delta)
    starting_at = schedule.starting_at.at if schedule.starting_at else None
    until = schedule.until.at if schedule.until else None
    named = _recurring(schedule, anchor, starting_at, seed)
    if calendar is not None:
        named = calendar.of(named, zone(schedule.timezone))
    return within(named, starting_at, until)


def _recurring(schedule: Schedule, anchor: datetime, starting_at: datetime | None, seed: str) -> Timetable:
    gap, overlap = schedule.dst.gap, schedule.dst.overlap
    if schedule.every is not None:
        step = schedule.every.delta
        if step < SHORTEST_EVERY:
            raise InvalidInput.field("schedule.every", "invalid", "must be at least 1 second")
        return Every(starting_at or anchor + step, step)
    if schedule.cron is not None:
        return Cron(cron.resolve(schedule.cron, seed), schedule.timezone, gap, overlap)
    if schedule.interval is not None:
        return _interval(schedule.interval, schedule.timezone, gap, overlap)
    if schedule.rrule is not None:
        first = _whole_second(starting_at or anchor)
        start = EPOCH if rrule.parse(schedule.rrule).says_it_all else first
        owed = rrule.compile_rule(schedule.rrule, start, schedule.timezone, gap, overlap)
        return Within(owed, first, owed.last)
    return Never()


def _interval(text: str, zone_name: str, gap: str, overlap: str) -> Timetable:
    tz, parsed = zone(zone_name), interval.parse(text)
    by_the_clock = interval.elapsed(parsed, tz)
    if by_the_clock is None:
        return LocalDays(interval.CalendarSteps(parsed, tz), tz, gap, overlap)
    first, step, last = by_the_clock
    return within(Every(first, step), None, last)


def _whole_second(instant: datetime) -> datetime:
    """Rules stand on whole seconds: this one, or the next."""
    return instant.replace(microsecond=0) + (_SECOND if instant.microsecond else timedelta(0))


def understood(schedule: Schedule, anchor: datetime) -> Schedule:
    """A schedule in plain English as the kind it means; raises `phrases.Unclear`."""
    tz = zone(schedule.timezone)
    kind, value = phrases.parse(schedule.text or "").meaning(anchor.astimezone(tz))
    if isinstance(value, timedelta):
        return msgspec.structs.replace(schedule, text=None, **{kind: Duration(value)})
    if isinstance(value, datetime):
        at = LocalDays(OneTime(value), tz, schedule.dst.gap, schedule.dst.overlap).next_after(
            value.replace(tzinfo=anchor.tzinfo) - timedelta(days=2)
        )
        told = {"manual": True} if at is None else {"at": Instant(at)}
        return msgspec.structs.replace(schedule, text=None, **told)
    return msgspec.structs.replace(schedule, text=None, **{kind: value})


def first_fire(
    schedule: Schedule | None,
    now: datetime,
    anchor: datetime | None = None,
    seed: str = "",
    calendar: Calendar | None = None,
) -> datetime | None:
    """When a job made at `now` is first due: never before `now`, so that an `at` a little in the past runs at once."""
    table = timetable(schedule, anchor or now, seed, calendar)
    return max(table.at, now) if isinstance(table, Once) else table.next_after(now - TICK)


def stands_for(schedule: Schedule | None, anchor: datetime) -> datetime | None:
    """The instant a one-time schedule names, though it may be past; None: the present."""
    table = None if schedule is None else timetable(schedule, anchor)
    return table.at if isinstance(table, Once) else None


# ── what follows from the job ────────────────────────────────────────────────────────────────────────────────────


def spread(schedule: Schedule | None, seed: str) -> timedelta:
    """How long after its nominal instant each run of a job begins: the same for ever, between 0 and `jitter`."""
    if schedule is None or schedule.jitter is None:
        return timedelta(0)
    drawn = int.from_bytes(hashlib.sha256(f"jitter/{seed}".encode()).digest()[:8])
    return drawn % (schedule.jitter.delta // TICK + 1) * TICK


def hashes(schedule: Schedule | None) -> bool:
    """Whether the instants of a schedule follow from the job that has it."""
    return schedule is not None and schedule.cron is not None and _HASHED.search(schedule.cron.upper()) is not None


def owed_by(schedule: Schedule | None) -> Schedule | None:
    """All of a schedule that says which instants it owes."""
    if schedule is None:
        return None
    return msgspec.structs.replace(schedule, misfire=Misfire(), jitter=None, max_runs=None)


def shared_timetable(schedule: Schedule | None, anchor: datetime, seed: str) -> str | None:
    """The same text for all jobs that owe the same instants for ever; None: owes none, by hand only."""
    owed = owed_by(schedule if schedule is None or schedule.text is None else understood(schedule, anchor))
    if owed is None:
        return f"once {iso(anchor)}"
    if owed.manual:
        return None
    told = [msgspec.json.encode(owed, enc_hook=encode_scalar).decode()]
    if hashes(owed):
        told.append(seed)
    if owed.delay is not None or (_counts_from_anchor(owed) and owed.starting_at is None):
        told.append(iso(anchor))
    return " ".join(told)


def _counts_from_anchor(schedule: Schedule) -> bool:
    if schedule.rrule is not None:
        return not rrule.parse(schedule.rrule).says_it_all
    return schedule.every is not None


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


def check_schedule(schedule: Schedule, now: datetime, seed: str = "") -> None:
    """Refuse a schedule that decodes and has exactly one kind, but names no instants, or none that are left."""
    try:
        zone(schedule.timezone)
    except ValueError:
        message = f"{schedule.timezone!r} is not a time zone of the tz database, such as Europe/Berlin or UTC"
        raise InvalidInput.field("schedule.timezone", "unknown_timezone", message) from None
    meant, kind = _readable(schedule, now, seed), schedule.kind
    _check_bounds(schedule, meant)
    if meant.at is not None and meant.at.at < minus(now, schedule.misfire.window.delta):
        message = f"{meant.at} is longer ago than misfire.window ({schedule.misfire.window})"
        raise InvalidInput.field(f"schedule.{kind}", "in_the_past", message)
    if meant.delay is not None and meant.delay.delta > LONGEST_DELAY:
        raise InvalidInput.field(f"schedule.{kind}", "invalid", "must be at most 10 years")
    if meant.every is not None and meant.every.delta < SHORTEST_EVERY:
        raise InvalidInput.field("schedule.every", "invalid", "must be at least 1 second")
    if kind != "manual" and meant.kind not in ONCE_KINDS:
        _check_left(schedule, now, seed)


def _readable(schedule: Schedule, now: datetime, seed: str) -> Schedule:
    """The schedule, in plain English as what it means; raises what cannot be read."""
    try:
        meant = schedule if schedule.text is None else understood(schedule, now)
        if meant.cron is not None:
            Cron(cron.resolve(meant.cron, seed), meant.timezone, meant.dst.gap, meant.dst.overlap)
        elif meant.interval is not None:
            _interval(meant.interval, meant.timezone, meant.dst.gap, meant.dst.overlap)
        elif meant.rrule is not None:
            _recurring(meant, now, schedule.starting_at.at if schedule.starting_at else None, seed)
        return meant
    except cron.NeverFires as e:
        raise InvalidInput.field("schedule.cron", "never_fires", str(e)) from None
    except cron.BadCron as e:
        raise InvalidInput.field("schedule.cron", "invalid_cron", str(e)) from None
    except interval.BadInterval as e:
        raise InvalidInput.field("schedule.interval", "invalid_interval", str(e)) from None
    except rrule.BadRule as e:
        raise InvalidInput.field("schedule.rrule", "invalid_rrule", str(e)) from None
    except phrases.Unclear as e:
        raise InvalidInput.field("schedule.text", "unclear_text", str(e)) from None


def _check_bounds(schedule: Schedule, meant: Schedule) -> None:
    if meant.kind == "manual" or meant.kind in ONCE_KINDS:
        for name in ("starting_at", "until", "max_runs", "jitter", "calendar"):
            if getattr(schedule, name) is not None:
                raise InvalidInput.field(f"schedule.{name}", "invalid", "goes with recurring schedules only")
    starting_at, until, jitter = schedule.starting_at, schedule.until, schedule.jitter
    if starting_at is not None and until is not None and until.at < starting_at.at:
        raise InvalidInput.field("schedule.until", "invalid", "lies before starting_at")
    if jitter is not None and not timedelta(0) < jitter.delta <= LONGEST_JITTER:
        raise InvalidInput.field("schedule.jitter", "invalid", "must be positive and at most 1 day")


def _check_left(schedule: Schedule, now: datetime, seed: str) -> None:
    """A recurring schedule owes something from now on."""
    if first_fire(schedule, now, None, seed) is not None:
        return
    if schedule.until is not None:
        unbounded = msgspec.structs.replace(schedule, until=None)
        if first_fire(unbounded, now, None, seed) is not None:
            raise InvalidInput.field("schedule.until", "never_fires", "there is no occurrence from now until then")
    message = f"names no instant from now on, or none in the next {FARTHEST_YEARS} years"
    raise InvalidInput.field(f"schedule.{schedule.kind}", "never_fires", message)


def check_calendar(schedule: Schedule, calendar: Calendar, now: datetime, seed: str = "") -> None:
    """Refuse a checked schedule that has nothing left beside the calendar it names, or too much to be moved by it."""
    if first_fire(schedule, now, None, seed, calendar) is None:
        message = "leaves nothing of the schedule from now on"
        raise InvalidInput.field("schedule.calendar", "never_fires", message)
    if calendar.mode != "next_business_day":
        return
    first = first_fire(schedule, now, None, seed) or now
    if timetable(schedule, now, seed).count(first - TICK, first + timedelta(days=1)) > MOST_MOVED:
        message = f"moves occurrences to the next business day, at most {MOST_MOVED} a day; skip them instead"
        raise InvalidInput.field("schedule.calendar", "too_often", message)


# ── in plain words ───────────────────────────────────────────────────────────────────────────────────────────────


def describe(schedule: Schedule | None, seed: str = "") -> str:
    """The schedule in plain words."""
    if schedule is None:
        return "once, now"
    if schedule.at is not None:
        return f"once at {iso(schedule.at.at)}"
    if schedule.delay is not None:
        return f"once, {words.length(schedule.delay.delta)} from now"
    if schedule.manual:
        return "by hand only"
    out = _kind_in_words(schedule, seed)
    if schedule.starting_at is not None:
        out += f", starting at {schedule.starting_at}"
    if schedule.until is not None:
        out += f", until {schedule.until}"
    if schedule.max_runs is not None:
        out += f", {schedule.max_runs} runs at most" if schedule.max_runs > 1 else ", one run at most"
    if schedule.calendar is not None:
        out += f", by the calendar {schedule.calendar}"
    if schedule.jitter is not None:
        out += f", each run up to {words.length(schedule.jitter.delta)} later"
    return out


def _kind_in_words(schedule: Schedule, seed: str) -> str:
    zoned = f" ({schedule.timezone})"
    if schedule.every is not None:
        return words.every_length(schedule.every.delta)
    if schedule.text is not None:
        return _phrase_in_words(phrases.parse(schedule.text), zoned)
    if schedule.interval is not None:
        return interval.in_words(interval.parse(schedule.interval)) + zoned
    if schedule.rrule is not None:
        return words.rule_in_words(rrule.parse(schedule.rrule)) + zoned
    told = cron.explain(schedule.cron or "", seed)
    return f"{told[0].lower()}{told[1:]}{zoned}"


def _phrase_in_words(phrase: phrases.Phrase, zoned: str) -> str:
    match phrase:
        case phrases.After():
            return f"once, {phrase}, seen from when it was made"
        case phrases.OnDay(day=str()):
            return f"once, {phrase}{zoned}, seen from when it was made"
        case phrases.OnDay():
            return f"once, {phrase}{zoned}"
        case phrases.Steps() if phrase.by_real_time:
            return str(phrase)
        case _:
            return f"{phrase}{zoned}"
