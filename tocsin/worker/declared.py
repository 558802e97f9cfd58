"""Makes the jobs and workflows that a module declares what it says, before its worker takes any of their runs.

With a key of its own: a worker's may only work. Several workers that start at once say the same, and the same again
changes nothing, so that they make one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import msgspec

from tocsin import wire
from tocsin.client import calls, workflow_calls
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


async def declare(jobs: list[Document], credentials: Credentials | None, workflows: Sequence[Document] = ()) -> None:
    """Make the jobs and workflows what these documents say. Raises `SetupError` if the server refuses one.

    Without a key that may do so the worker works all the same: its functions may be jobs of somebody else's making."""
    declared = [*jobs, *workflows]
    if not declared:
        return
    if credentials is None:
        names = [each["name"] for each in declared]
        log.warning("the jobs of the module are not made: no TOCSIN_KEY is known", jobs=names)
        return
    headers = {"Authorization": f"Bearer {credentials.key}"}
    connector = aiohttp.TCPConnector(ssl=credentials.trust())
    async with aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT, connector=connector) as session:
        api = _Api(session, credentials.url)
        try:
            for job in jobs:
                _check(job)
                await _make(api, "job", job, calls.put_job(job["name"], job))
            for workflow in workflows:
                await _make(api, "workflow", workflow, workflow_calls.put_workflow(workflow["name"], workflow))
            await _name_strays(api, declared)
        except ApiError as refused:
            if refused.status not in _NOT_ALLOWED:
                raise
            log.warning("the jobs of the module are not made: TOCSIN_KEY must be an editor's", why=str(refused))


async def _make(api: _Api, what: str, document: Document, call: Call[Document]) -> None:
    try:
        made = await api.send(call)
    except ApiError as refused:
        if refused.status in _NOT_ALLOWED:
            raise
        if refused.code != _OVER:
            raise SetupError(f"the {what} {document['name']} is refused: {refused}") from None
        log.warning("a declared schedule is over, and was left as it is", job=document["name"], why=refused.detail)
    else:
        log.info(what, name=made["name"], version=made["version"], schedule=made["schedule"].get("description"))


def _check(job: Document) -> None:
    """A declaration holds whenever a worker starts: what is to happen once would happen again."""
    try:
        once = wire.decode_job_spec(wire.encode(job)).once
    except msgspec.DecodeError as error:
        raise SetupError(f"the job {job['name']} cannot be: {error}") from None
    if once:
        raise SetupError(f"the job {job['name']} is declared to run once: submit it then, with .submit_at(…)")


async def _name_strays(api: _Api, declared: list[Document]) -> None:
    """Say which jobs of these apps are declared no more. They stay: another worker may well declare them still."""
    names = {each["name"] for each in declared}
    for app in {each["tags"][APP_TAG] for each in declared if APP_TAG in each.get("tags", {})}:
        stray = [name for name in await _names(api, app) if name not in names]
        if stray:
            log.warning("jobs of this app that it does not declare; `tocsin job cancel` ends one", app=app, jobs=stray)


async def _names(api: _Api, app: str) -> Iterable[str]:
    found: list[str] = []
    for state in ("active", "paused"):
        call: Call[Any] | None = calls.list_jobs(tag=f"{APP_TAG}:{app}", state=state, limit=500)
        while call is not None:
            page = await api.send(call)
            found += [job["name"] for job in page.items]
            call = next_page(call, page)
    return found


class _Api:
    """The API as a client knows it, over the worker's own HTTP library."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def send(self, call: Call[T]) -> T:
        """Send one call, until the server answers it."""
        flow = exchange(call, _RETRIES)
        request = next(flow)
        while True:
            try:
                request = flow.send(await self._deliver(request))
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    async def _deliver(self, request: Request) -> Answer | Unreachable:
        await asyncio.sleep(request.pause)
        url = f"{self._url}{request.path}"
        try:
            async with self._session.request(
                request.method, url, params=request.query, data=request.content, headers=request.headers
            ) as reply:
                headers = {name.lower(): value for name, value in reply.headers.items()}
                return Answer(reply.status, headers, await reply.read())
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:  # noqa: UP041 (differs before 3.11)
            problem = Unreachable(f"{type(error).__name__}: {error}")
            log.warning("the server does not answer; the module's jobs are still to be made", why=str(problem))
            return problem
