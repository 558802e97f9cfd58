"""What every call that changes a job asks of it first, once it holds the row."""

from __future__ import annotations

from tocsin.errors import Conflict, NotFound, PreconditionFailed
from tocsin.store.db import Row


def seen(job: Row | None, version: int | None) -> Row:
    """The job, which must exist; `version` is the one the caller has seen, if it says so."""
    if job is None:
        raise NotFound("there is no such job")
    if version is not None and job["version"] != version:
        raise PreconditionFailed(f"the job is at version {job['version']}, not {version}")
    return job


def opened(job: Row, verb: str) -> Row:
    """The job, which must not have ended."""
    if job["state"] not in ("active", "paused"):
        raise Conflict(f"a job that is {job['state']} cannot be {verb}", code=f"job_{job['state']}")
    return job
