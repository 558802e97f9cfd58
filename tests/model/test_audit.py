"""The chain's rules: nothing of a record can change without its hash, and no id that may still come is forgotten."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.audit import (
    GAP_MICROS,
    GENESIS,
    Anchor,
    Gap,
    Horizon,
    Record,
    between,
    canonical,
    is_excused,
    link,
    of_one_day,
    read_anchors,
    still_open,
    write_anchor,
)

text = st.text(max_size=20)
digests = st.none() | st.binary(min_size=32, max_size=32)
records = st.builds(
    Record,
    id=st.integers(1, 2**62),
    micros=st.integers(0, 2**53),
    actor=text,
    key_id=st.none() | text,
    action=text,
    target=text,
    detail=st.none() | text,
    before=digests,
    after=digests,
    address=st.none() | text,
    request_id=st.none() | text,
)


@given(records, records, st.integers(1, 9), st.integers(1, 9))
def test_two_records_never_read_the_same(one: Record, other: Record, seq: int, tenant_id: int) -> None:
    assert (canonical(tenant_id, seq, one) == canonical(tenant_id, seq, other)) == (one == other)
    assert canonical(tenant_id, seq, one) != canonical(tenant_id, seq + 1, one)
    assert canonical(tenant_id, seq, one) != canonical(tenant_id + 1, seq, one)


@given(records)
def test_a_hash_holds_what_came_before(record: Record) -> None:
    first = link(GENESIS, 1, 1, record)
    assert link(first, 1, 2, record) != link(GENESIS, 1, 2, record)


def test_the_hash_is_what_the_docs_say() -> None:
    """Whoever proves the chain without us has this to go by."""
    at = datetime(2026, 11, 16, 8, 0, 0, 123456, tzinfo=UTC)
    micros = int(at.timestamp()) * 1_000_000 + at.microsecond
    said = Record(7, micros, "key:ops", None, "job.edit", "job:x", '{"version": 2}', None, b"\1" * 32, "::1", "r")
    assert canonical(3, 5, said) == (
        b'[3,5,7,1794816000123456,"key:ops",null,"job.edit","job:x","{\\"version\\": 2}",null,"'
        + b"01" * 32
        + b'","::1","r"]'
    )


ids = st.sets(st.integers(1, 60), max_size=40)


@given(ids, st.lists(ids, max_size=6))
def test_every_id_is_met_once_or_waited_for(first: set[int], later: list[set[int]]) -> None:
    """Whatever comes later and in whatever order, ids that were not there yet are in a gap until they come."""
    high = max(first, default=0)
    gaps = between(0, sorted(first), xid=10, micros=0)
    come = set(first)
    for some in later:
        found = {id_ for id_ in some - come if any(gap.first <= id_ <= gap.last for gap in gaps)}
        gaps = still_open(gaps, sorted(found), Horizon(oldest=5, next=20, micros=1))
        come |= found
    waited = {id_ for gap in gaps for id_ in range(gap.first, gap.last + 1)}
    assert waited == set(range(1, high + 1)) - come


def test_a_gap_is_forgotten_when_nobody_can_fill_it_any_more() -> None:
    gap = Gap(3, 4, xid=100, micros=0)
    long_after = GAP_MICROS + 1
    assert still_open([gap], [], Horizon(99, 200, long_after)) == [gap]  # its transaction may run
    assert still_open([gap], [], Horizon(100, 200, GAP_MICROS)) == [gap]  # too soon to tell
    assert still_open([gap], [], Horizon(100, 200, long_after)) == []
    assert still_open([gap], [3], Horizon(100, 200, long_after)) == [Gap(4, 4, 100, 0)]  # there may be more to read
    assert still_open([gap], [], Horizon(5, 50, long_after)) == []  # another cluster's number


AT = datetime(2026, 11, 16, 8, 0, tzinfo=UTC)


def test_anchors_are_read_as_they_were_written_and_signed() -> None:
    plain = Anchor(tenant=1, seq=7, hash="ab", at=AT)
    signed = plain.signed("k1", b"k" * 32)
    found, odd = read_anchors(write_anchor(plain) + b"nonsense\n" + write_anchor(signed))
    assert (found, odd) == ([plain, signed], 1)
    assert signed.is_signed_with(b"k" * 32) and not signed.is_signed_with(b"x" * 32)
    for forged in ({"seq": 8}, {"hash": "cd"}, {"tenant": 2}, {"epoch": 1}, {"at": AT.replace(hour=9)}):
        assert not msgspec.structs.replace(signed, **forged).is_signed_with(b"k" * 32)


def test_a_restore_excuses_what_it_gave_up_and_nothing_before() -> None:
    restores = [(2, 50), (3, 80)]
    assert is_excused(Anchor(tenant=1, seq=51, hash="", at=AT, epoch=1), restores)
    assert not is_excused(Anchor(tenant=1, seq=50, hash="", at=AT, epoch=1), restores)
    assert not is_excused(Anchor(tenant=1, seq=70, hash="", at=AT, epoch=2), restores)
    assert not is_excused(Anchor(tenant=1, seq=90, hash="", at=AT, epoch=3), restores)


hours = st.lists(st.integers(-40, 90), max_size=30)


@given(hours, st.integers(-2, 4))
def test_a_file_has_what_was_sealed_up_to_the_end_of_its_first_day(given_hours: list[int], days: int) -> None:
    times = [AT + timedelta(hours=hour) for hour in given_hours]
    before = AT.date() + timedelta(days=days)
    count = of_one_day(times, before)
    if not times or times[0].date() >= before:
        assert count == 0
        return
    assert count >= 1 and all(at.date() <= times[0].date() < before for at in times[:count])
    assert count == len(times) or times[count].date() > times[0].date()
