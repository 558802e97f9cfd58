"""The doorkeeper: who stays longer than a call is shown out when his key ends, and which keys were used is noted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from tocsin.node.loop import Loop

_LOOK_SECONDS = 0.5
_NOTE_SECONDS = 60.0


class Guests(Protocol):
    """Streams and long polls: they outlive the authentication of their request, and must not outlive its key."""

    def keys_inside(self) -> set[str]:
        """With which keys somebody is here."""

    def show_out(self, key_ids: Collection[str]) -> None:
        """These keys have ended."""


class Doorkeeper(Loop):
    """Looks twice a second, so that a key which was revoked is good for nothing a second later."""

    name = "doorkeeper"

    def __init__(
        self,
        living: Callable[[set[str]], Awaitable[set[str]]],
        guests: Sequence[Guests],
        note_used: Callable[[], Awaitable[None]],
    ) -> None:
        """`living`: those of these keys that still open the door."""
        super().__init__()
        self._living = living
        self._guests = guests
        self._note_used = note_used
        self._noted_at = float("-inf")

    async def run_once(self) -> float:
        inside = set[str]().union(*(guests.keys_inside() for guests in self._guests))
        gone = inside - await self._living(inside) if inside else set()
        if gone:
            for guests in self._guests:
                guests.show_out(gone)
        if time.monotonic() - self._noted_at > _NOTE_SECONDS:
            self._noted_at = time.monotonic()
            await self._note_used()
        return _LOOK_SECONDS
