"""fairness: shares add up, follow the weights over time, and forget who was away."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tocsin.model.fairness import VirtualTime, allot

tenants = st.integers(1, 50)
times = st.dictionaries(tenants, st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=20)
weights = st.dictionaries(tenants, st.integers(1, 1000), max_size=20)


@given(st.integers(0, 2000), times, weights)
def test_shares_add_up_to_the_slots_and_nobody_gets_less_than_nothing(
    slots: int, behind: dict[int, float], weight: dict[int, int]
) -> None:
    shares = allot(slots, behind, weight)
    assert sum(shares.values()) == slots
    assert all(n > 0 for n in shares.values()) and shares.keys() <= behind.keys()


@given(st.integers(1, 500), times, weights)
def test_who_got_something_ends_no_further_ahead_than_who_got_nothing(
    slots: int, behind: dict[int, float], weight: dict[int, int]
) -> None:
    shares = allot(slots, behind, weight)
    # One slot is the grain: a tenant may be ahead of the level by what one slot weighs for it.
    before_last = {t: behind[t] + (n - 1) / weight.get(t, 1) for t, n in shares.items()}
    after = {t: behind[t] + shares.get(t, 0) / weight.get(t, 1) for t in behind}
    assert max(before_last.values()) <= min(after.values()) + 1 + 1e-6


@settings(max_examples=40)
@given(st.dictionaries(tenants, st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 7, 40]))
def test_over_many_rounds_shares_are_proportional_to_the_weights(weight: dict[int, int], slots: int) -> None:
    time, got = VirtualTime(), Counter[int]()
    rounds = max(1, 20 * sum(weight.values()) // slots)
    for _ in range(rounds):
        for tenant, n in allot(slots, time.of(weight), weight).items():
            time.charge(tenant, n, weight[tenant])
            got[tenant] += n
    total = rounds * slots
    assert got.total() == total
    for tenant, w in weight.items():
        fair = total * w / sum(weight.values())
        assert abs(got[tenant] - fair) <= max(2 * slots, 0.05 * fair + w + 2), (got, weight)


@settings(max_examples=40)
@given(st.integers(1, 10), st.integers(1, 10))
def test_one_slot_at_a_time_is_as_fair(a: int, b: int) -> None:
    time, got = VirtualTime(), Counter[int]()
    weight = {1: a, 2: b}
    for _ in range((a + b) * 10):
        [(tenant, one)] = allot(1, time.of(weight), weight).items()
        assert one == 1
        time.charge(tenant, 1, weight[tenant])
        got[tenant] += 1
    assert abs(got[1] - 10 * a) <= 1 + max(a, b) / min(a, b)


@given(st.integers(1, 500), st.integers(1, 100))
def test_a_tenant_that_was_away_is_brought_level(alone: int, slots: int) -> None:
    time = VirtualTime()
    time.of([1, 2])
    time.charge(1, alone, 1)  # 2 wants nothing meanwhile
    time.forget_idle({1})
    assert allot(2 * slots, time.of([1, 2]), {}) == {1: slots, 2: slots}, "its share was lent, not saved up"


def test_a_tenant_that_is_forgotten_owes_nothing_when_it_comes_back() -> None:
    time = VirtualTime()
    time.charge(1, 1000, 1)
    time.charge(2, 10, 1)
    time.forget_idle({2})
    assert time.of([1, 2]) == {1: 10.0, 2: 10.0}


@given(st.integers(1, 500), st.integers(1, 100))
def test_what_a_tenant_may_not_take_is_lent_too(alone: int, slots: int) -> None:
    time = VirtualTime()
    time.of([1, 2])
    time.charge(1, alone, 1)  # 2 has a queue, and no room under its quota
    time.lift([2, 3], min(time.of([1]).values()))
    assert allot(2 * slots, time.of([1, 2]), {}) == {1: slots, 2: slots}
