"""Hints between nodes: coalesced NOTIFYs, sent outside every hot transaction. Losing one costs a quarter second."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from tocsin.clock import EPOCH
from tocsin.flow.shared.transitions import Hint, Stop
from tocsin.node.loop import Loop
from tocsin.store.db import Connection, Database

CHANNEL = "tocsin_hints"
_GAP = 0.05
_MOST = 60  # of all that is told at once: a NOTIFY carries less than 8,000 bytes


class _Message(msgspec.Struct, array_like=True):
    node: str
    hints: list[tuple[int, int, float, float]]
    stops: list[tuple[str, str, int]]
    everywhere: bool
    drains: list[str] = []
    ended: list[tuple[str, str, int]] = []
    keys: list[str] = []


class Whisper(Loop):
    """Tells the other nodes what became claimable here, whom to stop and which keys have ended, and hears the same from
    them."""

    name = "whisper"

    def __init__(
        self,
        db: Database,
        heard: Callable[[Sequence[Hint], bool], None],
        stop: Callable[[Sequence[Stop], Sequence[str]], None],
        forget: Callable[[Sequence[str]], None],
    ) -> None:
        super().__init__()
        self._db = db
        self._heard = heard
        self._stop = stop
        self._forget = forget
        self._node = os.urandom(6).hex()
        self._hints: dict[tuple[int, int], Hint] = {}
        self._stops: list[Stop] = []
        self._drains: list[str] = []
        self._keys: list[str] = []
        self._sent = 0.0
        self._listener: Connection | None = None

    def say(
        self,
        hints: Iterable[Hint] = (),
        stops: Sequence[Stop] = (),
        drains: Sequence[str] = (),
        keys: Sequence[str] = (),
    ) -> None:
        """Pass on; several hints of one place become one. `drains`: workers that are to go; `keys`: those that have
        ended."""
        for hint in hints:
            known = self._hints.get(hint[:2])
            self._hints[hint[:2]] = (
                hint
                if known is None
                else hint._replace(
                    ready_at=min(hint.ready_at, known.ready_at), order_key=min(hint.order_key, known.order_key)
                )
            )
        self._stops += stops
        self._drains += drains
        self._keys += keys
        self.wake()

    async def run_once(self) -> float:
        if self._listener is None or self._listener.is_closed():
            self._listener = await self._db.listen(CHANNEL, self._on_message, lost=self.wake)
        if self._hints or self._stops or self._drains or self._keys:
            await asyncio.sleep(max(0.0, self._sent + _GAP - time.monotonic()))
            self._sent = time.monotonic()
            await self._db.notify(CHANNEL, self._next())
        return 0 if self._stops or self._drains or self._keys else 5.0

    def _next(self) -> str:
        """As much as one message holds, and of hints at least that there are some: whoever hears it looks himself."""
        room = _MOST
        keys, self._keys = self._keys[:room], self._keys[room:]
        room -= len(keys)
        stops, self._stops = self._stops[:room], self._stops[room:]
        room -= len(stops)
        drains, self._drains = self._drains[:room], self._drains[room:]
        room -= len(drains)
        hints, self._hints = list(self._hints.values()), {}
        few = [(h.lane_id, h.tenant_id, _seconds(h.ready_at), _seconds(h.order_key)) for h in hints[:room]]
        told, ended = ([s[:3] for s in stops if s.ended is wanted] for wanted in (False, True))
        message = _Message(self._node, few, told, len(hints) > room, drains, ended, keys)
        return msgspec.json.encode(message).decode()

    def _on_message(self, payload: str) -> None:
        message = msgspec.json.decode(payload, type=_Message)
        if message.node == self._node:
            return
        hints = [Hint(lane, tenant, _instant(due), _instant(key)) for lane, tenant, due, key in message.hints]
        self._heard(hints, message.everywhere)
        ended = [Stop(*s, ended=True) for s in message.ended]
        self._stop([*(Stop(*s) for s in message.stops), *ended], message.drains)
        self._forget(message.keys)

    async def stop(self) -> None:
        await super().stop()
        if self._listener is not None and not self._listener.is_closed():
            self._listener.terminate()


def _seconds(at: Any) -> float:
    return (at - EPOCH).total_seconds()  # type: ignore[no-any-return]


def _instant(seconds: float) -> Any:
    return EPOCH + timedelta(seconds=seconds)
