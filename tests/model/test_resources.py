"""Resources and placement: never over-committed, best fit, the same answer to the same question."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.resources import (
    MOST,
    NOTHING,
    Amounts,
    Guest,
    Room,
    Seating,
    amounts,
    class_of,
    may_hold,
    why_unschedulable,
)

some = st.builds(Amounts, st.integers(0, 8), st.integers(0, 8), st.integers(0, 8), st.integers(0, 2))
labels = st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy"), max_size=2)
rooms = st.lists(
    st.builds(
        lambda slots, total, used, has, lanes: (slots, total, used, has, lanes),
        st.integers(0, 3),
        some,
        some,
        labels,
        st.none() | st.sets(st.integers(1, 2)),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda made: [
        Room(range(10 * i, 10 * i + slots), total, used, has, lanes)
        for i, (slots, total, used, has, lanes) in enumerate(made)
    ]
)
guests = st.lists(
    st.builds(Guest, st.just(""), st.integers(1, 2), some, labels, st.booleans(), st.booleans()), max_size=12
).map(lambda made: [guest._replace(id=str(i)) for i, guest in enumerate(made)])


def seated(rooms: list[Room], guests: list[Guest]) -> tuple[Seating, dict[str, int]]:
    """Everybody asks once; who sits in which room."""
    seating = Seating(rooms)
    for guest in guests:
        assert seating.seat(guest) == (guest.id in seating.slot_of)
    return seating, {id_: slot // 10 for id_, slot in seating.slot_of.items()}


@given(rooms, guests)
def test_nothing_is_ever_given_out_twice(rooms: list[Room], guests: list[Guest]) -> None:
    seating, where = seated(rooms, guests)
    assert len(set(seating.slot_of.values())) == len(seating.slot_of)
    by_id = {guest.id: guest for guest in guests}
    for id_, i in where.items():
        assert seating.slot_of[id_] in rooms[i].slots
        assert rooms[i].lanes is None or by_id[id_].lane_id in rooms[i].lanes
    for i, room in enumerate(rooms):
        given_out = NOTHING
        for id_, at in where.items():
            given_out = given_out.plus(by_id[id_].needs) if at == i else given_out
        for had, used, more in zip(room.total, room.used, given_out, strict=True):
            assert not more or used + more <= had


@given(rooms, guests)
def test_who_finds_nothing_fits_nowhere(rooms: list[Room], guests: list[Guest]) -> None:
    """The first to ask sits unless no worker has room for it; and it leaves as little as can be left."""
    for guest in guests[:1]:
        _, where = seated(rooms, [guest])
        fits = [
            i
            for i, room in enumerate(rooms)
            if room.slots
            and (room.lanes is None or guest.lane_id in room.lanes)
            and guest.needs.within(room.total.minus(room.used))
            and (not guest.near_only or guest.prefer.items() <= room.labels.items())
        ]
        assert bool(where) == bool(fits)
        if fits:
            among = [i for i in fits if guest.prefer.items() <= rooms[i].labels.items()] or fits
            assert where[guest.id] in among, "near before far"
            most = [max(1, *(room.total[d] for room in rooms)) for d in range(4)] if len(rooms) > 1 else None
            if guest.needs != NOTHING and most:
                left = {i: left_over(rooms[i], guest, most) for i in among}
                assert left[where[guest.id]] <= min(left.values()) + 1e-9


def left_over(room: Room, guest: Guest, most: list[int]) -> float:
    """What a worker would have left, each resource as a part of the most that there is of it."""
    left = room.total.minus(room.used).minus(guest.needs)
    return sum(max(0, n) / scale for n, scale in zip(left, most, strict=True))


@given(rooms, guests)
def test_the_same_question_has_the_same_answer(rooms: list[Room], guests: list[Guest]) -> None:
    assert seated(rooms, guests)[1] == seated(rooms, guests)[1]


def test_best_fit_leaves_the_large_and_the_rare_alone() -> None:
    large, small = Room([0], Amounts(8000, 8000)), Room([10], Amounts(4000, 4000))
    with_gpu = Room([20], Amounts(4000, 4000, 0, 1))
    assert seated([large, small, with_gpu], [Guest("a", 1, Amounts(2000, 1000))])[1] == {"a": 1}
    assert seated([small, with_gpu], [Guest("a", 1, Amounts(2000, 1000, 0, 1))])[1] == {"a": 2}
    nearly_full = large._replace(used=Amounts(6000, 7000))
    assert seated([nearly_full, small], [Guest("a", 1, Amounts(2000, 1000))])[1] == {"a": 0}


def test_what_needs_nothing_goes_to_the_first_slot() -> None:
    one, two = Room([1, 3]), Room([0, 2], Amounts(1000))
    seating = Seating([one, two])
    assert [seating.seat(Guest(str(i), 1)) for i in range(5)] == [True] * 4 + [False]
    assert list(seating.slot_of.values()) == [0, 1, 2, 3]


def test_a_starving_run_has_a_worker_kept_for_it() -> None:
    full, half = Room(range(3), Amounts(4000), Amounts(4000)), Room(range(10, 13), Amounts(4000), Amounts(2000))
    seating = Seating([full, half])
    assert not seating.seat(Guest("large", 1, Amounts(3000), starving=True))
    assert seating.kept == {1: "large"}, "the one that lacks least"
    assert not seating.seat(Guest("small", 1, Amounts(1000))), "nothing of it goes to others"
    assert seating.seat(Guest("slot", 1)), "but slots that need nothing else do"
    again = Seating([full, half._replace(used=Amounts(1000), kept_for="large")])
    assert again.seat(Guest("large", 1, Amounts(3000), starving=True))
    assert again.kept == {} and again.free(1) == NOTHING


@given(rooms, guests)
def test_at_most_one_worker_is_kept_for_a_run_and_it_could_take_it(rooms: list[Room], guests: list[Guest]) -> None:
    seating, where = seated(rooms, guests)
    by_id = {guest.id: guest for guest in guests}
    assert not Counter(seating.kept.values()) - Counter(set(seating.kept.values()))
    for i, id_ in seating.kept.items():
        assert id_ not in where and by_id[id_].starving and by_id[id_].needs.within(rooms[i].total)


@given(some, some)
def test_a_class_is_open_to_whoever_could_take_one_of_it(needs: Amounts, total: Amounts) -> None:
    of_class = class_of(needs)
    assert all(n <= c < 2 * n or n == c == 0 for n, c in zip(needs, of_class, strict=True))
    if needs.within(total):
        assert may_hold(total, of_class)
    if not may_hold(total, of_class):
        assert not needs.within(total)


def test_amounts_of_documents() -> None:
    assert amounts({"cpu": 0.1, "memory_mb": 512}) == Amounts(100, 512)
    assert amounts({"cpu": 0.0001}) == Amounts(1)
    assert amounts({}) == NOTHING
    assert Amounts(1500, 1, 2, 3).document() == {"cpu": 1.5, "memory_mb": 1, "disk_mb": 2, "gpus": 3}
    assert max(class_of(Amounts(MOST, MOST, MOST, MOST))) < 2**31


def test_what_is_lacking_is_named_with_the_largest_there_is() -> None:
    workers = [Amounts(4000, 8000), Amounts(2000, 16_000)]
    told = why_unschedulable(Amounts(6500, 100, 0, 1), workers)
    assert told is not None
    assert told.endswith("has cpu 6.5 (the largest worker has 4), nor gpus 1 (the largest worker has 0)")
    told = why_unschedulable(Amounts(4000, 16_000), workers)
    assert told is not None and told.endswith("all that it needs together: cpu 4, memory_mb 16000")
    assert why_unschedulable(Amounts(4000, 8000), workers) is None
    assert why_unschedulable(Amounts(1), []) is None, "that is another matter"
