"""UUIDv7 ids, made from a given instant so that the database's clock rules them."""

from __future__ import annotations

import os
import uuid
from datetime import UTC, datetime, timedelta
from struct import unpack

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_VARIANT = 0b10 << 62


def new_ids(at: datetime, count: int) -> list[str]:
    """`count` rising ids whose time is `at`.

    The 12 bits after the millisecond count within the batch (and carry into it), so that a batch keeps its order:
    the overlap rule reads "earlier" from the id.
    """
    stamp = ((at - _EPOCH) // _MILLISECOND) << 12
    out = []
    for number, random in enumerate(unpack(f"{count}Q", os.urandom(8 * count)), stamp):
        # The milliseconds, the version and the count; the variant and 62 bits of chance.
        h, r = f"{number:015x}", f"{random >> 2 | _VARIANT:x}"
        out.append(f"{h[:8]}-{h[8:12]}-7{h[12:]}-{r[:4]}-{r[4:]}")
    return out


def new_id(at: datetime) -> str:
    """One id whose time is `at`."""
    return new_ids(at, 1)[0]


def parse_id(text: str) -> str | None:
    """The canonical form of a UUID, or None if it is none."""
    if len(text) != 36:
        return None
    try:
        return str(uuid.UUID(text))
    except ValueError:
        return None


def lowest_id(at: datetime) -> str:
    """The smallest UUIDv7 of the millisecond of `at`: a bound for ranges by time."""
    h = f"{(at - _EPOCH) // _MILLISECOND:012x}"
    return f"{h[:8]}-{h[8:]}-7000-8000-000000000000"


def instant_of(run_id: str) -> datetime:
    """When an id was made, to the millisecond."""
    return _EPOCH + int(run_id.replace("-", "")[:12], 16) * _MILLISECOND
