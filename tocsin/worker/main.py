"""Entry of the worker."""

from __future__ import annotations

import gc

import uvloop

from tocsin.client.credentials import Credentials
from tocsin.settings import Settings
from tocsin.telemetry import setup_logging
from tocsin.worker.agent import Agent
from tocsin.worker.limits import open_many_files


def run(
    *,
    url: str,
    key: str,
    ca: str = "",
    module: str | None,
    pool: str,
    slots: int,
    name: str,
    labels: dict[str, str],
    settings: Settings,
    resources: dict[str, float] | None = None,
    editor: Credentials | None = None,
) -> int:
    """Run a worker until it is drained or refused; its exit code. `editor`: with whose key the jobs that the module
    declares are made."""
    setup_logging(settings.log_level, settings.log_json)
    open_many_files()
    # Thousands of short-lived records a second and no cycles among them: look for cycles rarely.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

    async def work() -> int:
        agent = Agent(
            url=url,
            key=key,
            ca=ca,
            module=module,
            pool=pool,
            slots=slots,
            name=name,
            labels=labels,
            resources=resources,
            editor=editor,
            settings=settings,
        )
        return await agent.run()

    return uvloop.run(work())
