"""`tocsin up` gives up a server because of requests without an answer, never because of time alone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tocsin.cli import liveness as module
from tocsin.cli.liveness import Liveness, answers


class Server:
    """Answers or not, on a clock that the test moves. A request without an answer takes its time-out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: float = 30) -> None:
        self.now, self.up, self.asked = 1000.0, True, 0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.liveness = Liveness(self._answers, patience)

    def _answers(self, timeout: float) -> bool:
        self.asked += 1
        self.now += 0.001 if self.up else timeout
        return self.up

    def watch(self, seconds: float, process: int = 1) -> float | None:
        """Check at every tick, as the supervisor does, for this many seconds."""
        end = self.now + seconds
        while self.now < end:
            self.now = max(self.now, min(end, self.liveness.next_at))
            if (silent := self.liveness.gave_up(process)) is not None:
                return silent
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_a_silence_of_the_set_time_is_too_long(server: Server) -> None:
    assert server.watch(600) is None
    server.up, began = False, server.now
    assert server.watch(600) is not None
    assert 30 <= server.now - began <= 45


def test_one_answer_is_enough(server: Server) -> None:
    for _ in range(10):
        server.up = True
        assert server.watch(10) is None
        server.up = False
        assert server.watch(20) is None


def test_a_process_that_never_answered_is_starting(server: Server) -> None:
    server.up = False
    assert server.watch(3600) is None


def test_another_process_starts_with_a_new_count(server: Server) -> None:
    assert server.watch(10, process=1) is None
    server.up = False
    assert server.watch(20, process=1) is None
    assert server.watch(3600, process=2) is None, "the next one has not answered yet: it is starting"


def test_time_on_a_suspended_machine_does_not_count(server: Server) -> None:
    assert server.watch(60) is None
    server.now += 8 * 3600
    server.up = False
    assert server.watch(10) is None
    server.up = True
    assert server.watch(60) is None


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def address(listener: socket.socket) -> str:
    return "{}:{}".format(*listener.getsockname())


def test_a_closed_connection_is_an_answer_and_silence_is_none(listener: socket.socket) -> None:
    assert not answers(address(listener), False, 0.2), "nobody reads"
    closer = threading.Thread(target=lambda: [listener.accept()[0].close() for _ in range(2)])
    closer.start()
    assert answers(address(listener), False, 60), "closed at once: too many connections"
    closer.join()


def test_a_closed_port_is_no_answer(listener: socket.socket) -> None:
    where = address(listener)
    listener.close()
    assert not answers(where, False, 60)
