"""A memory of values by key that is bounded by bytes: entries differ in size by a factor of a thousand."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")
_PER_ENTRY = 500  # bytes of the keys and of the memory itself


class Memory(Generic[_Key, _Value]):
    """Keeps what was put in last, up to `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: _Key) -> _Value | None:
        """The value of a key, if it is kept."""
        found = self._known.get(key)
        return None if found is None else found[0]

    def put(self, key: _Key, value: _Value, size: int) -> None:
        """Keep a value of so many bytes; what was put in first goes. One that is larger than all room is not kept."""
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
