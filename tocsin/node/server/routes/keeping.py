"""What a job's document becomes before it is stored."""

from __future__ import annotations

from msgspec import UNSET

from tocsin.model.job import JobSpec, check
from tocsin.model.packed import LARGE
from tocsin.model.schedule import check_schedule
from tocsin.model.targets import content_of
from tocsin.node.server.http import Call


def is_confidential(spec: JobSpec) -> bool:
    """Whether what the job's target says is for its worker alone."""
    return spec.sensitive is True or spec.sealed is not UNSET


def may_be_apart(body: bytes) -> bool:
    """Whether a document in this body may say something that is too large for it, or refers to such a thing."""
    return len(body) > LARGE or b"$payload" in body


async def kept(call: Call, spec: JobSpec, apart: bool) -> JobSpec:
    """A new job's document without what its target says, where that is sealed or lies in object storage; `apart`: as
    `may_be_apart` tells. What is wrong with the document is said before anything is stored for it."""
    if not is_confidential(spec) and not (apart and content_of(spec.target)):
        return spec
    contents, tenant_id = call.node.contents, call.who.tenant_id
    spec = await contents.whole(tenant_id, spec)
    check(spec)
    if spec.schedule is not None:
        check_schedule(spec.schedule, call.node.db.clock.now())
    return await contents.keep(tenant_id, spec)
