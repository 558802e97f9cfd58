"""The whole proof of time: every expression at every distinct move of the clock, 1970 to 2037 (`make test-time`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing import Pool
from random import Random

from tests.time.compare import differences
from tests.time.expressions import EXPRESSIONS
from tests.time.oracle import Move, Window, distinct_moves, zones
from tocsin.model.cron import TZDATA_VERSION

_SHOWN = 20


def check(move: Move) -> tuple[int, list[str]]:
    """How many comparisons were made around a move, and what differs."""
    compared, wrong = 0, []
    for what in differences(Window(move), Random(move.at)):
        compared += 1
        if what:
            wrong.append(what)
    return compared, wrong


def results(moves: list[Move]) -> Iterator[tuple[int, list[str]]]:
    with Pool(os.cpu_count()) as pool:
        yield from pool.imap_unordered(check, moves, chunksize=4)


def main() -> int:
    """Print how much was compared and what differs; 1 if anything does."""
    moves, began = distinct_moves(), time.monotonic()
    print(
        f"tzdata {TZDATA_VERSION}: {len(zones())} zones, {len(moves)} distinct moves of the clock 1970–2037 "
        f"(in {len({move.zone for move in moves})} zones), {len(EXPRESSIONS)} expressions"
    )
    compared, wrong = 0, []
    for done, (count, odd) in enumerate(results(moves), 1):
        compared += count
        wrong += odd
        if done % 100 == 0 or done == len(moves):
            print(
                f"\r{done} of {len(moves)} moves, {compared:,} comparisons, {len(wrong)} differences",
                end="",
                flush=True,
            )
    print(f"\n{compared:,} comparisons in {time.monotonic() - began:.0f} s: {len(wrong)} differences")
    for what in islice(wrong, _SHOWN):
        print(f"  {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
