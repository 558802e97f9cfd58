"""Expressions for the proof of time: a fixed list with every form of the syntax, and a strategy over all of it.

Clocks are moved in the small hours, mostly on Sundays, near the ends of months and, where a zone changed its mind, on
any day: so do these expressions name them.
"""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st


def each(text: str) -> list[str]:
    """What stands between bars and line ends."""
    return [part.strip() for line in text.splitlines() for part in line.split("|") if part.strip()]


# Fixed and open times of day, most of them where clocks are moved.
_TIMES = each("""
    0 0 | 1 0 | 15 0 | 30 0 | 59 0 | 0 1 | 15 1 | 30 1 | 0 2 | 1 2 | 30 2 | 59 2 | 0 3 | 30 3 | 0 4 | 0 12 | 0 22
    0 23 | 1 23 | 30 23 | 59 23 | 0,30 1 | 0,30 2 | 0,20,40 0-3 | 15,45 23,0 | 30 0-23 | 0 0-23/2 | 0-59 1 | 0-59 2
    10-50/20 1-2 | 5-55/10 0-23/3 | 0 21-23 | 59 0-4 | 0 1,13 | 29,31 0,1,2,3
    * * | 0 * | 30 * | */5 * | */7 * | 7/15 * | 0,30 * | 0 */2 | 0 */3 | 15 1/2 | 30 2/6 | */30 */4 | 0 1,*/8
    * 0 | * 1 | * 2 | */15 1 | */20 2 | */30 2 | 5/10 3 | 3/20 23 | * 1-3 | */10 0,2 | * 22-23
""")
# The same with seconds.
_SECONDS = each("""
    0 30 2 | 30 30 2 | 59 59 1 | 0 0 0 | 59 59 23 | 0-9 0 3 | 15,45 0,30 1 | 30 0 0-23 | 10 20 1-2
    * * * | 0 * * | 30 * * | */10 * * | 3/15 * * | */7 * * | 15 0 * | 0 0 * | 0 30 */2 | * 0 * | 30 */10 */3
    * 30 1 | */20 30 2 | * * 2 | 0 * 1 | 0 */30 2 | 45 59 * | 1-3 0 1/3 | * 59 23 | */30 0 0 | 5/30 * 0-3
""")
# Dates by every form.
_DATES = each("""
    * * SUN | * * 0 | * * 7 | * * SAT,SUN | * * MON-FRI | * * 5-7 | * * */2 | * * 1/3 | * * ? | ? * MON
    ? * SUN#1 | ? * SUN#2 | ? * 0#3 | ? * SUN#4 | ? * SUN#5 | ? * SUNL | ? * 0L | ? * SATL,FRIL | ? * FRI#1,THU#4
    1 * ? | 31 * ? | L * ? | L-1 * ? | L-3 * ? | L-6 * ? | L-29 * ? | LW * ? | 1W * ? | 15W * ? | 28W * ? | 30W * ?
    31W * ? | 1-7 * ? | 25-31 * ? | 8-14 3 ? | */2 * * | 2/3 * * | 1,L,15W * ? | 29 2 ? | L 2 ?
    1 * SUN | 13 * FRI | 31 * SUN | L * SUNL | 15W * SUN#2 | 25-31 * SUN | 1-31 * MON | */7 * SUN | L * */3
    * 3 * | * MAR,OCT,NOV * | * 1-6 * | * */2 * | * 2/3 SUN | * APR-SEP ? | 1 1,4,7,10 ? | 31 12 ? | 29-31 12 ?
""")
_HASHED = each("""
    H H * * * | H(0-29) 2 * * * | H/15 * * * * | H(0-29)/10 1 * * * | 0 H(0-3) * * * | 0 H/2 * * * | H H H * * *
    0 2 H * * | 0 2 * * H | 30 1 H/7 * * | H 0 H(1-7) H ?
""")
_MACROS = each("@yearly | @annually | @monthly | @weekly | @daily | @midnight | @hourly")


def _dated() -> list[str]:
    """Each form of date at fixed times that are moved, in turn, and once at an open time."""
    fixed, opened = ("30 2", "0,30 0", "30 1", "0 0", "30 23"), ("*/20 *", "0 */3", "*/15 1", "*/30 * *")
    return [f"{times[place % len(times)]} {date}" for place, date in enumerate(_DATES) for times in (fixed, opened)]


EXPRESSIONS: list[str] = list(
    dict.fromkeys(
        [f"{time} * * *" for time in _TIMES + _SECONDS]
        + _dated()
        + _HASHED
        + _MACROS
        + [f"{time} {date}" for time, date in product(("15 2", "45 0 *"), ("* * SUN", "L * ?"))]
    )
)

# ── any expression ───────────────────────────────────────────────────────────────────────────────────────────────


def _plain(low: int, high: int, names: list[str]) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    pair = st.tuples(number, number).map(sorted)
    step = st.integers(1, high - low)
    return st.one_of(
        number.map(str),
        pair.map(lambda p: f"{p[0]}-{p[1]}"),
        st.tuples(pair, step).map(lambda p: f"{p[0][0]}-{p[0][1]}/{p[1]}"),
        step.map(lambda n: f"*/{n}"),
        st.tuples(number, step).map(lambda p: f"{p[0]}/{p[1]}"),
        st.sampled_from(["*", *names]),
    )


def _hashed(low: int, high: int) -> st.SearchStrategy[str]:
    pair = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    step = st.integers(1, high - low)
    return st.one_of(
        st.just("H"),
        step.map(lambda n: f"H/{n}"),
        pair.map(lambda p: f"H({p[0]}-{p[1]})"),
        st.tuples(pair, step).map(lambda p: f"H({p[0][0]}-{p[0][1]})/{p[1]}"),
    )


def _listed(item: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(item, min_size=1, max_size=3).map(",".join)


_WEEKDAYS, _MONTHS = each("SUN|MON|TUE|WED|THU|FRI|SAT"), each("JAN | feb | Mar | OCT-DEC | APR-sep | NOV")
_SECOND = _MINUTE = _listed(_plain(0, 59, []) | _hashed(0, 59))
_HOUR = _listed(_plain(0, 23, []) | _hashed(0, 23) | st.sampled_from(["0", "1", "2", "3", "23", "1-2"]))
_DAY = _listed(
    _plain(1, 31, ["?", "L", "LW"])
    | _hashed(1, 28)
    | st.integers(1, 30).map(lambda n: f"L-{n}")
    | st.integers(1, 31).map(lambda n: f"{n}W")
)
_MONTH = st.just("*") | _listed(_plain(1, 12, _MONTHS) | _hashed(1, 12))
_WEEKDAY = _listed(
    _plain(0, 6, ["?", "7", "5-7", "MON-FRI", *_WEEKDAYS])
    | _hashed(0, 6)
    | st.sampled_from([*_WEEKDAYS, *"01234567"]).map(lambda d: f"{d}L")
    | st.tuples(st.sampled_from([*_WEEKDAYS, *"01234567"]), st.integers(1, 5)).map(lambda p: f"{p[0]}#{p[1]}")
)
_FIVE = st.tuples(_MINUTE, _HOUR, _DAY | st.just("*"), _MONTH, _WEEKDAY | st.just("*")).map(" ".join)
# Whatever the syntax allows; a few of them never fire.
ANY_EXPRESSION = _FIVE | st.tuples(_SECOND, _FIVE).map(" ".join) | st.sampled_from(_MACROS)
