"""Durations and instants on the wire."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.scalars import EARLIEST, LATEST, Duration, Instant, decode_scalar, encode_scalar


@pytest.mark.parametrize(
    ("text", "seconds", "written"),
    [
        ("PT5M", 300, "PT5M"),
        ("5m", 300, "PT5M"),
        ("90s", 90, "PT1M30S"),
        ("1h30m", 5400, "PT1H30M"),
        ("P1DT1H", 90_000, "P1DT1H"),
        ("P1W", 604_800, "P7D"),
        ("PT0.5S", 0.5, "PT0.5S"),
        ("250ms", 0.25, "PT0.25S"),
        ("PT0S", 0, "PT0S"),
        ("PT1.000001S", 1.000001, "PT1.000001S"),
        ("PT90M", 5400, "PT1H30M"),
    ],
)
def test_reads_and_writes_durations(text: str, seconds: float, written: str) -> None:
    read = Duration.parse(text)
    assert (read.seconds, str(read)) == (seconds, written)


@pytest.mark.parametrize(
    "text",
    [
        *("", "P", "PT", "5", "m", "-5m", "PT-5M", "P1M", "P1Y", "1y", "5 m", "PT5M ", "pt5m", "5M", "PT5", "PT1H5"),
        *("٥m", "1e3s", "PT1.1234567S", "P1DT", "P36601D", "9" * 30 + "d", "9" * 41, "NaN", "inf", "PT5M\n", "5m3h"),
    ],
)
def test_refuses_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        Duration.parse(text)


@given(st.timedeltas(timedelta(0), timedelta(days=36_600)))
def test_a_duration_survives_writing(delta: timedelta) -> None:
    assert Duration.parse(str(Duration(delta))) == Duration(delta)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("2026-12-01T09:00:00Z", "2026-12-01T09:00:00.000000Z"),
        ("2026-12-01t09:00:00z", "2026-12-01T09:00:00.000000Z"),
        ("2026-12-01 09:00:00+02:00", "2026-12-01T07:00:00.000000Z"),
        ("2026-12-01T09:00:00.5-05:30", "2026-12-01T14:30:00.500000Z"),
        ("1970-01-01T00:00:00Z", "1970-01-01T00:00:00.000000Z"),
        ("2028-02-29T00:00:00Z", "2028-02-29T00:00:00.000000Z"),
    ],
)
def test_reads_and_writes_instants(text: str, written: str) -> None:
    assert str(Instant.parse(text)) == written


@pytest.mark.parametrize(
    "text",
    [
        *("2026-12-01T09:00:00", "2026-12-01", "2026-12-01T09:00Z", "now", "", "infinity", "1764579600"),
        *("2026-12-01T09:00:60Z", "2026-12-01T24:00:00Z", "2026-W01-1T00:00:00Z", "2026-02-29T00:00:00Z"),
        *("0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "10000-01-01T00:00:00Z", "1969-12-31T23:59:59Z"),
        *("0001-01-01T00:00:00+23:00", "2026-12-01T09:00:00+25:00", "٢٠26-12-01T09:00:00Z", "2026-12-01T09:00:00Z\n"),
    ],
)
def test_refuses_what_is_no_instant(text: str) -> None:
    with pytest.raises(ValueError):
        Instant.parse(text)


@given(st.datetimes(EARLIEST.replace(tzinfo=None), LATEST.replace(tzinfo=None)), st.integers(-12 * 60, 14 * 60))
def test_an_instant_survives_writing(local: datetime, offset: int) -> None:
    at = Instant(local.replace(tzinfo=UTC).astimezone(timezone(timedelta(minutes=offset))))
    assert Instant.parse(str(at)) == at


def test_both_pass_through_json() -> None:
    both = (Duration.parse("PT5M"), Instant.parse("2026-12-01T09:00:00Z"))
    text = msgspec.json.encode(both, enc_hook=encode_scalar)
    assert text == b'["PT5M","2026-12-01T09:00:00.000000Z"]'
    assert msgspec.json.decode(text, type=tuple[Duration, Instant], dec_hook=decode_scalar) == both


@pytest.mark.parametrize("body", [b"5", b"null", b"true", b'"x"', b"[]"])
def test_a_wrong_shape_is_a_validation_error(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Duration, dec_hook=decode_scalar)


def test_equal_ones_hash_alike() -> None:
    assert len({Duration.parse("60s"), Duration.parse("PT1M")}) == 1
    assert len({Instant.parse("2026-12-01T09:00:00Z"), Instant.parse("2026-12-01T10:00:00+01:00")}) == 1
    assert Duration.parse("60s") != timedelta(seconds=60)
