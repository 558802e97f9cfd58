"""The two Python functions that the worker of `tocsin demo` serves."""

from __future__ import annotations

import asyncio
from typing import Any

from tocsin import App

app = App()


@app.function("demo.greet")
def greet(ctx: Any, who: str = "world") -> str:
    """Says hello, and returns it as the run's result."""
    ctx.log.info("attempt %s of run %s", ctx.attempt, ctx.run_id)
    return f"Hello, {who}!"


@app.function("demo.report")
async def report(day: str, pages: int = 3) -> dict[str, Any]:
    """Takes a moment for each page."""
    for page in range(1, pages + 1):
        await asyncio.sleep(0.5)
        print(f"page {page} of {day}")
    return {"day": day, "pages": pages}
