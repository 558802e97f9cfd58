"""What the page for Python teams shows is Python that does what it says."""

from __future__ import annotations

import re
from typing import Any

from docs import generate

PAGE = (generate.DOCS / "how-to" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def block(about: str) -> str:
    [found] = [text for text in BLOCKS if about in text]
    return str(found)


def ran(code: str, **names: Any) -> dict[str, Any]:
    """The names there are after this code."""
    exec(code, names)  # noqa: S102 (our own page)
    return names


def test_its_test_passes() -> None:
    ran(block('App("reports")') + block("def test_daily"))["test_daily"]()


def test_its_checkpoints_go_on_where_they_stopped() -> None:
    loaded: list[int] = []

    async def load(page: int) -> None:
        loaded.append(page)
        if len(loaded) == 3:
            raise ConnectionError("once")

    names = ran(block('App("reports")') + block("def import_pages"), load=load)
    with names["app"].testing("2026-03-06T08:00:00Z") as testing:
        run = names["import_pages"].submit(4)
        testing.advance("1m")
        assert (run.state, loaded) == ("succeeded", [0, 1, 2, 2, 3])


async def test_its_submissions_are_ones() -> None:
    body = block("submit_many").replace("\n", "\n    ")
    names = ran(block('App("reports")') + f"async def submit():\n    {body}\n    return runs")
    with names["app"].testing("2026-03-06T08:00:00Z"):
        assert len(await names["submit"]()) == 2
