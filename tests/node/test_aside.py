"""The thread beside the event loop: one computation at a time, and no tenant blocks the others."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tocsin.node.aside import Aside


async def test_a_tenant_that_asks_for_much_waits_for_itself() -> None:
    aside, order = Aside(), []
    go = threading.Event()
    many = [asyncio.create_task(aside.run(1, go.wait, 60))]
    await asyncio.sleep(0)
    many += [asyncio.create_task(aside.run(1, order.append, f"many {n}")) for n in range(5)]
    await asyncio.sleep(0)
    few = asyncio.create_task(aside.run(2, order.append, "few"))
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*many, few)
    assert order.index("few") == 0
    assert order[1:] == [f"many {n}" for n in range(5)]
    assert not aside._turns
    aside.close()


async def test_a_cancelled_caller_gives_up_its_turn() -> None:
    aside, done = Aside(), []
    go = threading.Event()
    first = asyncio.create_task(aside.run(1, go.wait, 60))
    await asyncio.sleep(0)
    gone = asyncio.create_task(aside.run(1, done.append, "gone"))
    stays = asyncio.create_task(aside.run(1, done.append, "stays"))
    await asyncio.sleep(0)
    gone.cancel()
    go.set()
    await asyncio.gather(first, stays)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert done == ["stays"]
    aside.close()


async def test_an_exception_of_a_computation_is_raised() -> None:
    aside = Aside()
    with pytest.raises(ZeroDivisionError):
        await aside.run(1, divmod, 1, 0)
    aside.close()
