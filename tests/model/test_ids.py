"""Ids carry the database's time and keep a batch's order."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.ids import instant_of, lowest_id, new_id, new_ids, parse_id

NOW = datetime(2026, 6, 1, 12, 0, 0, 123_456, tzinfo=UTC)
MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(2999, 12, 30)).map(lambda d: d.replace(tzinfo=UTC))


@given(MOMENTS)
def test_is_a_uuid7_of_its_instant(at: datetime) -> None:
    made = uuid.UUID(new_id(at))
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert instant_of(str(made)) == at - timedelta(microseconds=at.microsecond % 1000)


@given(MOMENTS, st.integers(0, 300))
def test_a_batch_rises_and_starts_at_its_lowest(at: datetime, count: int) -> None:
    made = new_ids(at, count)
    assert len(set(made)) == count
    assert made == sorted(made)
    assert all(i >= lowest_id(at) for i in made)


def test_a_batch_larger_than_the_counter_still_rises() -> None:
    made = new_ids(NOW, 10_000)
    assert made == sorted(set(made))
    assert all(uuid.UUID(i).version == 7 for i in made[4090:4100])


def test_a_later_millisecond_is_a_higher_id() -> None:
    assert (
        max(new_ids(NOW, 100)) < lowest_id(NOW + timedelta(milliseconds=1)) <= new_id(NOW + timedelta(milliseconds=1))
    )


def test_ids_are_not_guessable() -> None:
    assert len({i[-16:] for i in new_ids(NOW, 1000)}) == 1000


def test_reads_any_form_of_the_same_id_as_one() -> None:
    made = new_id(NOW)
    assert parse_id(made) == parse_id(made.upper()) == made


@pytest.mark.parametrize("text", ["", "x" * 36, "0" * 32, "../" * 12, "\0" * 36, "{" + "0" * 34 + "}", "0" * 10_000])
def test_what_is_no_id_is_none(text: str) -> None:
    assert parse_id(text) is None
