"""A cache of values by key, bounded by bytes: entries differ in size by a factor of a thousand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_PER_ENTRY = 500  # bytes of the keys and of the cache itself


class Memory(Generic[_Key, _Value]):
    """Keeps the most recently added values, up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        """Drop all values."""
        self._known.clear()
        self.size = 0

    def get(self, key: _Key) -> _Value | None:
        """Return the value of a key, or None if it is not kept."""
        found = self._known.get(key)
        return None if found is None else found[0]

    def put(self, key: _Key, value: _Value, size: int) -> None:
        """Keep a value of this size in bytes. The oldest values are dropped. A value larger than the whole cache is not
        kept."""
        before = self._known.pop(key, None)
        if before is not None:
            self.size -= before[1]
        size += _PER_ENTRY
        if size > self._most:
            return
        self._known[key] = value, size
        self.size += size
        while self.size > self._most:
            self.size -= self._known.popitem(last=False)[1][1]
