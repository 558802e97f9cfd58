"""Schedules in plain English: a small strict grammar. What it reads becomes another kind of schedule; what could be
meant in two ways is refused, with the words that would be clear.

    in 10 minutes
    today | tomorrow | on 2026-12-24            at TIME
    every 15 minutes | every 2 hours            [between 9:00 and 17:00] [DAYS]
    hourly                                      [DAYS]
    DAYS at TIME[, TIME and TIME]

    DAYS    every day, daily · every weekday, on weekdays · every weekend, on weekends
            every monday and thursday, on mondays · every 2 days · every 2 weeks on monday
            on the 1st and 15th [of every month] · on the last day of the month · every 3 months on the 1st
            first monday of every month, last friday of the month · first | last weekday of the month
            every january 1st, every year on july 4th
    TIME    9:00, 17:30, 9am, 5:30 pm, noon, midnight (the day's first instant)

A phrase that is read can be written again (`str`), in one form that reads as the same: that is what a job answers.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tocsin.model.phrases.reader import Reader, Unclear
from tocsin.model.phrases.said import After, AtTimes, OnDay, Phrase, Steps

__all__ = ["After", "AtTimes", "OnDay", "Phrase", "Steps", "Unclear", "is_once", "parse"]

_TOKEN = re.compile(r"\d{4}-\d\d-\d\d(?!\d)|\d{1,2}:\d\d(?::\d\d)?|\d+|[a-z]+|,", re.ASCII)


@lru_cache(maxsize=16_384)
def parse(text: str) -> Phrase:
    """Read a phrase; raises Unclear."""
    lowered = " ".join(text.lower().split()).replace("a.m.", "am").replace("p.m.", "pm").removesuffix(".")
    tokens = _TOKEN.findall(lowered)
    if "".join(tokens) != lowered.replace(" ", ""):
        raise Unclear("is written with words, numbers and times such as 9:00 only")
    return Reader(tokens).phrase()


def is_once(text: str) -> bool:
    """Whether a phrase names one instant; one that cannot be read does not."""
    try:
        return parse(text).once
    except Unclear:
        return False
