"""Tables for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def as_csv(fields: Sequence[str], items: Iterable[Mapping[str, Any]], *, header: bool = True) -> str:
    """Rows of CSV, below their names. Spreadsheets take text that begins like a formula for one, so it gets a quote in
    front."""
    out = io.StringIO()
    writer = csv.writer(out)
    if header:
        writer.writerow(fields)
    for item in items:
        writer.writerow([_cell(item[name]) for name in fields])
    return out.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
