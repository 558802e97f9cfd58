"""Limits: keys, rates, and who may start."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.limits import BadLimit, Rate, Wish, admit, check_key, depends_on_args, key_id, parse_rate, rendered

NOW = datetime(2026, 11, 16, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("billing", "billing"),
        ("customer-{args.customer}", "customer-7"),
        ("{args.order.region}/{args.vip}", "eu/true"),
        ("{args.nobody}.{args.order}.{args.customer.id}", ".."),
    ],
)
def test_keys_are_made_from_arguments(template: str, key: str) -> None:
    check_key(template)
    args = {"customer": 7, "order": {"region": "eu"}, "vip": True}
    assert rendered(template, args) == key
    assert depends_on_args(template) == ("{" in template)
    assert key_id(1, key) == key_id(1, key) != key_id(2, key)


@pytest.mark.parametrize(
    "template", ["", "  ", "{customer}", "a{", "}", "{args}", "{args.}", "{{args.a}}", "{args.a b}"]
)
def test_other_braces_are_refused(template: str) -> None:
    with pytest.raises(BadLimit):
        check_key(template)


@pytest.mark.parametrize(
    ("text", "gap", "burst"),
    [
        ("100/min", 0.6, 2),
        ("10/s", 0.1, 10),
        ("10/sec", 0.1, 10),
        ("1/hour", 3600, 1),
        ("1000/day", 86.4, 1),
        ("5/10min", 120, 1),
        ("6/ 2 minutes", 20, 1),
    ],
)
def test_rates_are_read(text: str, gap: float, burst: int) -> None:
    assert parse_rate(text) == Rate(timedelta(seconds=gap), burst)
    assert parse_rate(text, 7).burst == 7


@pytest.mark.parametrize(
    "text", ["", "100", "0/s", "1/0s", "-1/s", "1/fortnight", "9999999999/s", "1/999999day", "1.5/s"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(BadLimit):
        parse_rate(text)


@given(
    st.integers(1, 50),
    st.integers(1, 20),
    st.lists(st.floats(0, 3), min_size=1, max_size=60),
    st.integers(1, 5),
)
def test_no_window_sees_more_than_the_rate_and_one_burst(many: int, burst: int, gaps: list[float], each: int) -> None:
    rate = Rate(SECOND / many, burst)
    now, tat, went = NOW, None, []
    for gap in gaps:
        now += timedelta(seconds=gap)
        go = min(each, rate.room(tat, now))
        if go:
            tat = rate.after(tat, now, go)
            went += [now] * go
        elif tat is not None:
            assert rate.opens_at(tat) > now - timedelta(microseconds=burst + 1)
    for i, start in enumerate(went):
        for j in range(i, len(went)):
            window = (went[j] - start) / rate.gap
            assert j - i + 1 <= burst + window + 1e-3 * burst


def wishes() -> st.SearchStrategy[list[Wish]]:
    jobs = {job: (limit, key) for job, limit, key in zip("abc", (1, 3, None), (None, "k", "k"), strict=True)}
    return st.lists(st.sampled_from("abc"), max_size=20).map(
        lambda names: [Wish(i, job, jobs[job][1], jobs[job][0], 2, None) for i, job in enumerate(names)]
    )


@given(wishes(), st.dictionaries(st.sampled_from(["a", "b", "c", "k"]), st.integers(0, 3)), st.integers(1, 10))
def test_no_limit_is_passed_and_nobody_waits_in_vain(some: list[Wish], running: dict[str, int], slots: int) -> None:
    verdict = admit(some, running, {}, NOW, slots)
    count = Counter(running)
    for wish in some:
        if wish.run in verdict.going:
            count.update(filter(None, (wish.job, wish.key)))
    for wish in some:
        if wish.run in verdict.going:
            assert wish.job_max is None or count[wish.job] <= wish.job_max
            assert wish.key is None or wish.key_max is None or count[wish.key] <= wish.key_max
    limits = {"a": 1, "b": 3, "k": 2}
    for blocked in verdict.blocked:
        assert blocked.by == "limit"
        assert count[blocked.key] >= limits[blocked.key]
    judged = set(verdict.going) | {b.run for b in verdict.blocked}
    assert len(verdict.going) <= slots
    assert len(verdict.going) == slots or judged == {w.run for w in some}


def test_a_rate_lets_a_burst_through_and_says_when_it_opens() -> None:
    rate = Rate(10 * SECOND, 2)
    some = [Wish(i, "a", rate=rate) for i in range(4)]
    verdict = admit(some, {}, {}, NOW, 10)
    assert verdict.going == [0, 1]
    assert [(b.run, b.by, b.key) for b in verdict.blocked] == [(2, "rate", "a"), (3, "rate", "a")]
    assert rate.opens_at(verdict.tats["a"]) == NOW + 10 * SECOND
    later = admit(some[2:], {}, verdict.tats, NOW + 10 * SECOND, 10)
    assert later.going == [2]
