"""Work that failed. It is left out for a minute, so that it hides no other work of the same kind."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tocsin.flow.shared.transitions import Key

_MOST, _SECONDS = 1000, 60.0


class Failed:
    """Keys of failed jobs or runs, at most a thousand. A statement with a limit must ask for `len` more rows."""

    def __init__(self) -> None:
        self._until: dict[Key, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: Key) -> None:
        """Leave out a key for a minute."""
        if len(self._until) < _MOST:
            self._until[key] = time.monotonic() + _SECONDS

    def without(self, keys: Iterable[Key]) -> list[Key]:
        """Return the keys that are not left out."""
        now = time.monotonic()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return [key for key in keys if key not in self._until]
