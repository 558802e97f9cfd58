"""Tables for spreadsheets."""

from __future__ import annotations

import csv
import io

from hypothesis import given
from hypothesis import strategies as st

from tocsin.model.tables import as_csv


@given(st.text(max_size=20), st.integers())
def test_no_text_of_a_table_is_a_formula(text: str, number: int) -> None:
    [head, row] = csv.reader(io.StringIO(as_csv(("a", "b"), [{"a": text, "b": number}]), newline=""))
    assert head == ["a", "b"] and row[1] == str(number)
    assert row[0].removeprefix("'") == text.removeprefix("'") and row[0][:1] not in set("=+-@\t\r")


def test_the_names_stand_once_above_all_pages() -> None:
    whole = as_csv(("a",), ({"a": n} for n in range(3)))
    assert (
        as_csv(("a",), ()) + as_csv(("a",), ({"a": n} for n in range(3)), header=False)
        == whole
        == "a\r\n0\r\n1\r\n2\r\n"
    )
