"""Jobs that tell what they were told in confidence, in every way they can think of.

As a program: `python tests/cluster/blabbers.py` tells the variable TOKEN and TOCSIN_ARGS, and fails.
As functions: `tocsin worker tests.cluster.blabbers:app`.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any
from urllib.parse import quote

from tocsin import App

app = App("blabbers")


def ways(value: str) -> list[str]:
    """How a value may be told."""
    data = value.encode()
    wrapped = base64.encodebytes(b"a long text before it, so that it is cut, and then " + data).decode()
    return [
        value,
        f"https://example.com/?token={quote(value, safe='')}",
        json.dumps({"token": value}),
        *(base64.b64encode(b"x" * n + data + b"y").decode() for n in range(3)),
        *wrapped.splitlines(),
        "z" * (16 * 1024 - 5) + value,  # cut by the worker
    ]


@app.function("tell")
def tell(ctx: Any, **args: Any) -> dict[str, Any]:
    """Logs, prints and returns it all."""
    confidential = [*ctx.secrets.values(), *map(str, args.values())]
    for value in confidential:
        for line in ways(value):
            ctx.log.info(line)
            print(line, file=sys.stderr)
    return {"told": confidential, confidential[0]: ways(confidential[0])}


@app.function("keep")
async def keep(ctx: Any, **args: Any) -> str:
    """Leaves it all to its next attempt, which tells whether it came back."""
    confidential = [*ctx.secrets.values(), *map(str, args.values())]
    if ctx.attempt == 1:
        await ctx.checkpoint({"told": confidential, "ways": ways(confidential[0])})
        raise RuntimeError("once more")
    return "as it was" if ctx.saved["told"] == confidential else "changed"


@app.function("pass_on")
async def pass_on(ctx: Any) -> Any:
    """Tells what the run before it has told."""
    ctx.log.info(str(ctx.results["first"]))
    return dict(ctx.results)


@app.function("fail")
async def fail(ctx: Any, **args: Any) -> None:
    """Raises it all."""
    raise RuntimeError(" and ".join([*ctx.secrets.values(), *map(str, args.values())]))


if __name__ == "__main__":
    for told in (os.environ["TOKEN"], *map(str, json.loads(os.environ["TOCSIN_ARGS"]).values())):
        for text in ways(told):
            print(text, flush=True)
        middle = len(told) // 2
        sys.stderr.write(told[:middle])
        sys.stderr.flush()
        time.sleep(0.2)  # two writes, which the worker reads one after the other
        sys.stderr.write(told[middle:] + "\n")
    sys.exit(3)
