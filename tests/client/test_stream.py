"""A stream of events: bytes to events however they are cut, and what happens when it breaks."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Reply, Script, problem

from tocsin.client import ApiError, Client, Event, Retries, Unreachable
from tocsin.client.core import Call
from tocsin.client.stream import Stream

WORDS = (
    b"retry: 1000\n\n"
    b'id: 1\nevent: open\ndata: {"type": "open"}\n\n'
    b": quiet\nid: 2\n\n"
    b'id: 3\r\nevent: run\r\ndata: {"n":\r\ndata: 1}\r\n\r\n'
    b'event: end\ndata: {"reason": "leaving"}\n\n'
)
EVENTS = [Event("1", "open", {"type": "open"}), Event("3", "run", {"n": 1})]
EVENT_STREAM = {"Content-Type": "text/event-stream"}


def stream(retries: Retries | None = None) -> Stream:
    return Stream(Call("GET", "/v1/events", json.loads), retries or Retries(), lambda: 0.0)


@given(st.lists(st.integers(0, len(WORDS))))
def test_events_are_the_same_however_their_bytes_are_cut(places: list[int]) -> None:
    reading = stream()
    edges = [0, *sorted(places), len(WORDS)]
    parts = [WORDS[start:end] for start, end in pairwise(edges)]
    assert [event for part in parts for event in reading.feed(part)] == EVENTS
    assert reading.request().headers["Last-Event-ID"] == "3"


def test_a_heartbeat_moves_the_place_and_half_an_event_does_not() -> None:
    reading = stream()
    assert "Last-Event-ID" not in reading.request().headers
    assert list(reading.feed(b": quiet\nid: 7\n\nid: 8\nevent: run\ndata: {")) == []
    assert reading.request().headers["Last-Event-ID"] == "7"
    assert list(reading.feed(b'"n": 1}\n\n')) == [], "what was left of the old connection is forgotten"


def test_a_server_that_was_there_is_waited_for_and_one_that_never_was_is_not() -> None:
    gone = Unreachable("gone")
    never = stream(Retries(attempts=3))
    never.broke(gone)
    never.broke(gone)
    with pytest.raises(Unreachable):
        never.broke(gone)
    known = stream(Retries(attempts=3, first_pause=1, longest_pause=2))
    list(known.feed(WORDS))
    for _ in range(50):
        known.broke(gone)
        assert 0 < known.request().pause <= 2
    with pytest.raises(ApiError):
        known.broke(ApiError(401, "unauthorized", "revoked"))
    impatient = stream(Retries(attempts=1))
    list(impatient.feed(WORDS))
    with pytest.raises(Unreachable):
        impatient.broke(gone)


def test_a_client_takes_a_stream_up_again_until_it_is_refused(script: Script) -> None:
    script.on(
        "GET",
        "/v1/events",
        Reply(200, WORDS, EVENT_STREAM),
        Reply(hang_up=True),
        problem(503, "unavailable"),
        Reply(200, b'id: 4\nevent: run\ndata: {"n": 2}\n\n', EVENT_STREAM),
        problem(401, "unauthorized"),
    )
    told = []
    with Client(script.url, "key", retries=Retries(first_pause=0.001)) as client, pytest.raises(ApiError) as caught:
        for event in client.events(type="run", job="j", after="0"):
            told.append(event)
    assert told == [*EVENTS, Event("4", "run", {"n": 2})]
    assert caught.value.status == 401
    assert [asked.headers.get("last-event-id") for asked in script.asked] == [None, "3", "3", "3", "4"]
    assert all(asked.query == {"type": "run", "job": "j", "after": "0"} for asked in script.asked)
