"""Cron expressions on a real calendar: which instants an expression owes in a time zone.

`syntax` reads an expression, `days` walks and counts what it owes, `words` says it in English; zones come from the
pinned tzdata wheel. A job's expression is first resolved (each `H` becomes a number that follows from the job), and
the resolved text with its zone and rules is the key that equal jobs share.

Where the clock is moved (PROMISES P9; `gap` and `overlap` are chosen per schedule):

open     `*`, `*/n` or `a/n` in the hour field follows the real clock: each instant at which the clock reads a time
         that the expression names, once or twice, whatever the rules below; in a finer field it does so in an overlap
fixed    hours that are named one by one or as a range fire once per reading:
gap      times that do not exist fire together once, at the first instant after them that does (`next_valid`), or not
         at all (`skip`); on a date that the zone left out altogether (Apia, 30 December 2011) nothing is owed
overlap  times that come twice fire the `first` time, the `second`, or `both`
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

from tocsin.model.cron.days import CronDays
from tocsin.model.cron.syntax import BadCron, NeverFires, parse, resolve
from tocsin.model.cron.words import describe
from tocsin.model.zones import TZDATA_VERSION, first_valid, zone, zone_names

__all__ = [
    "TZDATA_VERSION",
    "BadCron",
    "CronDays",
    "NeverFires",
    "compile_cron",
    "explain",
    "first_valid",
    "next_instant",
    "resolve",
    "zone",
    "zone_names",
]


@lru_cache(maxsize=16_384)
def compile_cron(resolved: str, zone_name: str, gap: str = "next_valid", overlap: str = "first") -> CronDays:
    """The owed instants of a resolved expression in a zone; raises as `resolve` does, or ValueError (zone, rules)."""
    return CronDays(parse(resolved), zone(zone_name), gap, overlap)


@lru_cache(maxsize=65_536)
def next_instant(resolved: str, zone_name: str, gap: str, overlap: str, second: datetime) -> datetime | None:
    """The first owed instant after a whole second, computed once for every job with the same plan."""
    return compile_cron(resolved, zone_name, gap, overlap).next_after(second)


def explain(expression: str, seed: str = "") -> str:
    """The expression in plain words, each `H` as what it stands for."""
    return describe(parse(resolve(expression, seed)))
