"""Functions that raise or return objects made to break their readers. `app` is a worker's module."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tocsin.client.app import App, GiveUp
from tocsin.client.failures import Retry

app = App()


def bad(*_: object, **__: object) -> NoReturn:
    raise ValueError("this cannot be looked at")


def exits(*_: object) -> NoReturn:
    raise SystemExit(3)


# ── exceptions ───────────────────────────────────────────────────────────────────────────────────────────────────────


class TextRaises(Exception):
    __str__ = __repr__ = bad


class TextExits(Exception):
    __str__ = __repr__ = exits


class TextIsNoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class EvilText(str):
    """A text whose methods fail."""

    __str__ = __len__ = __getitem__ = __hash__ = __eq__ = __format__ = bad  # type: ignore[assignment]
    split = encode = startswith = replace = rpartition = strip = bad  # type: ignore[assignment]


class TextIsEvil(Exception):
    def __str__(self) -> str:
        return EvilText("evil")


class Huge(Exception):
    def __str__(self) -> str:
        return "x" * 20_000_000


class BareRetry(Retry):
    def __init__(self) -> None: ...


class RetryWithText(Retry):
    def __init__(self, seconds: Any) -> None:
        self.seconds = seconds


class RetryWithProperty(Retry):
    seconds = property(bad)  # type: ignore[assignment]

    def __init__(self) -> None: ...


class EvilFloat(float):
    __float__ = __eq__ = __le__ = __ge__ = bad  # type: ignore[assignment]


class BareGiveUp(GiveUp):
    def __init__(self) -> None: ...


class NoClass(Exception):
    __class__ = property(bad)  # type: ignore[assignment]


class NoAttributes(Exception):
    __getattribute__ = bad


class NoTraceback(Exception):
    __traceback__ = property(bad)  # type: ignore[assignment]
    __cause__ = __context__ = __notes__ = property(bad)  # type: ignore[assignment]


class NoEquality(Exception):
    __eq__ = __hash__ = __bool__ = __reduce__ = bad  # type: ignore[assignment]


class NoName(type):
    """A metaclass without names."""


NoName.__name__ = "NoName"
NoName.__getattribute__ = bad  # type: ignore[method-assign,assignment]
Nameless = NoName("Nameless", (Exception,), {"__module__": 5})
ODD_NAMES = {"__module__": "odd\x00module", "__qualname__": "Line\nbreak\ud800" + "x" * 5000}
OddlyNamed: type[Exception] = type("OddlyNamed", (Exception,), ODD_NAMES)


class OwnBase(BaseException):
    """Not an Exception."""


def raises(make: Callable[[], BaseException]) -> Callable[[], NoReturn]:
    def raise_it() -> NoReturn:
        raise make()

    return raise_it


def cyclic_cause() -> NoReturn:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def deep_group() -> NoReturn:
    group: Exception = ValueError("leaf")
    for _ in range(2000):
        group = ExceptionGroup("group", [group])
    raise group


def deep_stack(depth: int = 0) -> NoReturn:
    deep_stack(depth + 1)


def unreadable_source() -> NoReturn:
    class Loader:
        get_source = bad

    names: dict[str, Any] = {"__name__": "odd", "__loader__": Loader()}
    exec(compile("def f(): raise ValueError('no source')\nf()", "<odd>", "exec"), names)  # noqa: S102
    raise AssertionError


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Unreadable:
    """An object on which every access fails."""

    __class__ = property(bad)  # type: ignore[assignment]
    __getattribute__ = __eq__ = __hash__ = __reduce__ = __str__ = __repr__ = __bool__ = bad  # type: ignore[assignment]


class ExitsWhenRead:
    __getattribute__ = exits
    __str__ = __repr__ = exits


def cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def generator() -> Iterator[int]:
    yield 1


def prints_evil() -> NoReturn:
    sys.stdout.write(EvilText("evil, and no end of line"))
    raise ValueError("printed")


FAILS: dict[str, Callable[[], Any]] = {
    "text raises": raises(TextRaises),
    "text exits": raises(TextExits),
    "text is no text": raises(TextIsNoText),
    "text is evil": raises(TextIsEvil),
    "text is huge": raises(Huge),
    "text has surrogates": raises(lambda: ValueError("\ud800 \udfff")),
    "retry without init": raises(BareRetry),
    "retry with text": raises(lambda: RetryWithText("soon")),
    "retry with nan": raises(lambda: RetryWithText(float("nan"))),
    "retry with a huge integer": raises(lambda: RetryWithText(10**400)),
    "retry with an evil float": raises(lambda: RetryWithText(EvilFloat(3))),
    "retry with an object": raises(lambda: RetryWithText(Unreadable())),
    "retry with a property": raises(RetryWithProperty),
    "give up without init": raises(BareGiveUp),
    "no class": raises(NoClass),
    "no attributes": raises(NoAttributes),
    "no traceback": raises(NoTraceback),
    "no equality": raises(NoEquality),
    "nameless": raises(Nameless),
    "oddly named": raises(OddlyNamed),
    "own base": raises(OwnBase),
    "system exit": raises(lambda: SystemExit(1)),
    "keyboard interrupt": raises(KeyboardInterrupt),
    "generator exit": raises(GeneratorExit),
    "cancelled": raises(asyncio.CancelledError),
    "stop iteration": raises(lambda: StopIteration(5)),
    "stop async iteration": raises(StopAsyncIteration),
    "memory": raises(MemoryError),
    "cyclic cause": cyclic_cause,
    "group": raises(lambda: BaseExceptionGroup("all", [SystemExit(1), ValueError("x")])),
    "deep group": deep_group,
    "deep stack": deep_stack,
    "unreadable source": unreadable_source,
    "returns unreadable": Unreadable,
    "returns what exits": ExitsWhenRead,
    "returns cycle": cyclic,
    "returns deep": deep,
    "returns generator": generator,
    "returns huge integer": lambda: 10**400,
    "returns surrogates": lambda: "\ud800",
    "returns evil text in a dict": lambda: {EvilText("k"): EvilText("v")},
    "returns a class": lambda: NoClass,
    "returns a function": lambda: bad,
    "returns odd keys": lambda: {(1, 2): object()},
    "prints evil": prints_evil,
}


@app.function("odd")
async def odd(shape: str) -> Any:
    return FAILS[shape]()


@app.function("odd_late")
async def odd_late(shape: str) -> Any:
    """Show the odd shape after the call has waited."""
    await asyncio.sleep(0)
    return FAILS[shape]()


@app.function("odd_in_task")
async def odd_in_task(shape: str) -> Any:
    """Show the odd shape in a task of the function's own."""

    async def inner() -> Any:
        return FAILS[shape]()

    return await asyncio.create_task(inner())


@app.function("odd_sync")
def odd_sync(shape: str) -> Any:
    return FAILS[shape]()


@app.job(name="odd_isolated", isolation="process")
async def odd_isolated(shape: str) -> Any:
    return FAILS[shape]()


@app.job(name="odd_sync_isolated", isolation="process")
def odd_sync_isolated(shape: str) -> Any:
    return FAILS[shape]()


@app.function("steady")
async def steady(n: int) -> int:
    for _ in range(3):
        await asyncio.sleep(0)
    return n


@app.function("steady_sync")
def steady_sync(n: int) -> int:
    return n


@app.job(name="steady_isolated", isolation="process")
def steady_isolated(n: int) -> int:
    return n


@app.function("waits")
async def waits(n: int) -> int:
    """Wait beside all others until stopped."""
    await asyncio.Event().wait()
    return n
