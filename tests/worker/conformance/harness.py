"""What the suite must be told of a kind of target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal

from tocsin import wire

from ..gateway import Gateway

Deed = Literal[
    "nothing",  # ends at once and well, without a word
    "say",  # writes the line "héllo", and ends well
    "fail",  # ends badly by its own will
    "die",  # ends by a crash
    "absent",  # cannot be started at all: no such program, function, host, image
    "wait",  # begins, writes the line "up" if it can write, and waits for ever; ends when it is asked to
    "refuse",  # the same, but whoever asks it to end is not heard
    "flood",  # writes 40 MB of lines, each of 999 times "x", and ends well
    "binary",  # writes the bytes BINARY, and ends well
    "hog",  # tries to use 600 MB of memory, and ends well if it can; the run is given 64 MB
]
BINARY = b"\xff\x00\x1b[31m ok \xc3\xa9\r\nlong " + b"\xc3\xa9" * 10_000 + b"\nno end"


class Harness(ABC):
    """One kind. What a deed leaves to be seen (`left`) goes into the folder `where`."""

    kind: ClassVar[str]
    fails_as: ClassVar[tuple[str, int | None]]  # the error class and exit code of "fail"
    dies_as: ClassVar[str]  # the error class of "die"
    absent_as: ClassVar[str] = "start"  # the error class of "absent"
    lacks: ClassVar[dict[Deed, str]] = {}  # deeds that this kind does not have, and why
    outlives_workers: ClassVar[bool] = False  # what runs does, for the run's next attempt to go on with
    worker: ClassVar[dict[str, Any]] = {}  # what its worker is given (`launch.py`)

    def __init__(self, where: Path) -> None:
        self.where = where

    def missing(self) -> str:
        """Why this kind cannot be tried on this machine; empty if it can. Loud: the suite prints it."""
        return ""

    async def __aenter__(self) -> Harness:
        return self

    async def __aexit__(self, *exc: object) -> None:  # noqa: B027 (most set up nothing)
        """Take down what was set up."""

    @abstractmethod
    def target(self, deed: Deed) -> dict[str, Any]:
        """A target document that does it."""

    @abstractmethod
    def left(self) -> list[str]:
        """What runs at this moment of all that the deeds "wait" and "refuse" have begun."""

    async def begun(self, gateway: Gateway, run: wire.ClaimedRun) -> None:
        """Wait until a run that waits or refuses has begun."""
        await gateway.line_of(run, "up")
