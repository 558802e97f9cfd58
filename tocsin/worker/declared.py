"""Makes the jobs that a module declares what it says, before its worker takes any of their runs.

With a key of its own: a worker's may only work. Several workers that start at once say the same, and the same again
changes nothing, so that they make one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec

from tocsin import wire
from tocsin.client import calls
from tocsin.client.core import Answer, ApiError, Call, Document, Request, Retries, T, Unreachable, exchange, next_page
from tocsin.client.credentials import Credentials
from tocsin.client.declared import APP_TAG
from tocsin.errors import SetupError
from tocsin.telemetry import get_logger

log = get_logger("worker")

# Patient: a worker may well be started before its server.
_RETRIES = Retries(attempts=1_000_000, longest_pause=5.0)
_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
_NOT_ALLOWED = (401, 403)
_OVER = "never_fires"  # its schedule had an end, and that has come


async def declare(jobs: list[Document], credentials: Credentials | None) -> None:
    """Make the jobs what these documents say. Raises `SetupError` if the server refuses one.

    Without a key that may do so the worker works all the same: its functions may be jobs of somebody else's making."""
    if not jobs:
        return
    if credentials is None:
        log.warning("the jobs of the module are not made: no TOCSIN_KEY is known", jobs=[job["name"] for job in jobs])
        return
    headers = {"Authorization": f"Bearer {credentials.key}"}
    async with aiohttp.ClientSession(base_url=credentials.url, headers=headers, timeout=_TIMEOUT) as session:
        try:
            for job in jobs:
                await _make(session, job)
            await _name_strays(session, jobs)
        except ApiError as refused:
            if refused.status not in _NOT_ALLOWED:
                raise
            log.warning("the jobs of the module are not made: TOCSIN_KEY must be an editor's", why=str(refused))


async def _make(session: aiohttp.ClientSession, job: Document) -> None:
    _check(job)
    try:
        made = await _send(session, calls.put_job(job["name"], job))
    except ApiError as refused:
        if refused.status in _NOT_ALLOWED:
            raise
        if refused.code != _OVER:
            raise SetupError(f"the job {job['name']} is refused: {refused}") from None
        log.warning("a declared schedule is over, and was left as it is", job=job["name"], why=refused.detail)
    else:
        log.info("job", name=made["name"], version=made["version"], schedule=made["schedule"].get("description"))


def _check(job: Document) -> None:
    """A declaration holds whenever a worker starts: what is to happen once would happen again."""
    try:
        once = wire.decode_job_spec(wire.encode(job)).once
    except msgspec.DecodeError as error:
        raise SetupError(f"the job {job['name']} cannot be: {error}") from None
    if once:
        raise SetupError(f"the job {job['name']} is declared to run once: submit it then, with .submit_at(…)")


async def _name_strays(session: aiohttp.ClientSession, jobs: list[Document]) -> None:
    """Say which jobs of these apps are declared no more. They stay: another worker may well declare them still."""
    declared = {job["name"] for job in jobs}
    for app in {job["tags"][APP_TAG] for job in jobs if APP_TAG in job.get("tags", {})}:
        stray = [name for name in await _names(session, app) if name not in declared]
        if stray:
            log.warning("jobs of this app that it does not declare; `tocsin job cancel` ends one", app=app, jobs=stray)


async def _names(session: aiohttp.ClientSession, app: str) -> Iterable[str]:
    found: list[str] = []
    for state in ("active", "paused"):
        call: Call[Any] | None = calls.list_jobs(tag=f"{APP_TAG}:{app}", state=state, limit=500)
        while call is not None:
            page = await _send(session, call)
            found += [job["name"] for job in page.items]
            call = next_page(call, page)
    return found


async def _send(session: aiohttp.ClientSession, call: Call[T]) -> T:
    flow = exchange(call, _RETRIES)
    request = next(flow)
    while True:
        try:
            request = flow.send(await _deliver(session, request))
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


async def _deliver(session: aiohttp.ClientSession, request: Request) -> Answer | Unreachable:
    await asyncio.sleep(request.pause)
    try:
        async with session.request(
            request.method, request.path, params=request.query, data=request.content, headers=request.headers
        ) as reply:
            headers = {name.lower(): value for name, value in reply.headers.items()}
            return Answer(reply.status, headers, await reply.read())
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (differs before 3.11)
        return Unreachable(f"{type(error).__name__}: {error}")
