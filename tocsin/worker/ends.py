"""The ends of attempts before they leave the worker: masked, cleaned, and made encodable."""

from __future__ import annotations

from typing import Literal

from tocsin.model.loglines import from_outside
from tocsin.wire import ClaimedRun, Finished, RunError, encode_msgpack
from tocsin.worker.executors import Attempt

_ERROR_CHARS = 8192  # the server's limit


def outgoing(attempt: Attempt, end: Finished) -> Finished:
    """Return an end as it leaves the worker: secrets are masked first, then texts are cleaned and cut."""
    try:
        attempt.mask_end(end)
    except Exception as exc:
        # The text of the exception may contain the value that could not be masked.
        return _unreportable(end, f"its secrets cannot be masked ({type(exc).__name__})")
    error = end.error
    if error is not None:
        error.class_ = from_outside(error.class_)
        error.message = from_outside(error.message)[:_ERROR_CHARS]
    return end


def not_begun(run: ClaimedRun, outcome: Literal["failed", "cancelled"], why: str = "") -> Finished:
    """Return the end of a run that was never given to an executor."""
    error = RunError(class_="start", message=why) if why else None
    return Finished(
        run_id=run.run_id, tenant=run.tenant, attempt=run.attempt, fence=run.fence, outcome=outcome, error=error
    )


def reportable(end: Finished) -> Finished:
    """Return the end itself if it can be encoded, otherwise an end that says so."""
    try:
        encode_msgpack(end)
    except Exception as exc:
        return _unreportable(end, type(exc).__name__)
    return end


def _unreportable(end: Finished, why: str) -> Finished:
    """Return the end of an attempt whose own end cannot be sent to the server."""
    message = f"the attempt ended ({end.outcome}), but its end cannot be reported: {why}"
    return Finished(
        run_id=end.run_id,
        tenant=end.tenant,
        attempt=end.attempt,
        fence=end.fence,
        outcome="failed",
        held_ms=end.held_ms,
        ran_ms=end.ran_ms,
        error=RunError(class_="unreportable", message=message),
    )
