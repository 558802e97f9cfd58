"""Every error Tocsin raises on purpose, in one tree.

    TocsinError
    ├── ApiProblem                 what the HTTP API answers as application/problem+json
    │   ├── BadRequest        400  the request cannot be read
    │   ├── Unauthorized      401
    │   ├── Forbidden         403
    │   ├── NotFound          404  also for what belongs to another tenant
    │   ├── MethodNotAllowed  405
    │   ├── RequestTimeout    408  the request did not arrive in time
    │   ├── Conflict          409
    │   ├── PreconditionFailed 412
    │   ├── TooLarge          413
    │   ├── UnsupportedMedia  415
    │   ├── MisdirectedRequest 421 a name that this server does not go by
    │   ├── InvalidInput      422  readable, but not acceptable; names each field
    │   │   └── NotSupported       named by the contract, not built yet
    │   ├── UpgradeRequired   426  a worker of another release than this server can work with
    │   ├── TooManyRequests   429
    │   ├── HeadersTooLarge   431
    │   ├── Unavailable       503
    │   │   ├── ObjectLost         what object storage was given is gone, or is not what it was
    │   │   ├── OutcomeUnknown     the connection died around COMMIT
    │   │   └── Contention         deadlock, lock or time limit; nothing happened, try again
    │   └── ServerFault       500
    └── SetupError                 this machine, home or database cannot work; says what to do

``code`` is stable and part of the API; ``detail`` is for people and may change.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TocsinError(Exception):
    """Base of everything Tocsin raises on purpose."""


class SetupError(TocsinError):
    """This machine, home folder or database cannot serve; the text says why and what to do."""


class ApiProblem(TocsinError):
    """An answer of the HTTP API that is not a success (RFC 9457)."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "Internal error"
    default_code: ClassVar[str] = "internal"

    def __init__(
        self,
        detail: str = "",
        *,
        code: str | None = None,
        errors: list[dict[str, str]] | None = None,
        extra: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.code = code or self.default_code
        self.errors = errors
        self.extra = extra or {}
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The problem document."""
        out: dict[str, Any] = {
            "type": f"urn:tocsin:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
        }
        if self.errors is not None:
            out["errors"] = self.errors
        return out | self.extra


class BadRequest(ApiProblem):
    status, title, default_code = 400, "Bad request", "bad_request"


class Unauthorized(ApiProblem):
    status, title, default_code = 401, "Unauthorized", "unauthorized"


class Forbidden(ApiProblem):
    status, title, default_code = 403, "Forbidden", "forbidden"


class NotFound(ApiProblem):
    status, title, default_code = 404, "Not found", "not_found"


class MethodNotAllowed(ApiProblem):
    status, title, default_code = 405, "Method not allowed", "method_not_allowed"


class RequestTimeout(ApiProblem):
    status, title, default_code = 408, "Request timeout", "request_timeout"


class Conflict(ApiProblem):
    status, title, default_code = 409, "Conflict", "conflict"


class PreconditionFailed(ApiProblem):
    status, title, default_code = 412, "Precondition failed", "precondition_failed"


class TooLarge(ApiProblem):
    status, title, default_code = 413, "Content too large", "too_large"


class UnsupportedMedia(ApiProblem):
    status, title, default_code = 415, "Unsupported media type", "unsupported_media_type"


class MisdirectedRequest(ApiProblem):
    status, title, default_code = 421, "Misdirected request", "misdirected"


class InvalidInput(ApiProblem):
    """Readable but not acceptable. ``errors`` names each offending field."""

    status, title, default_code = 422, "Invalid input", "invalid_input"

    @classmethod
    def field(cls, path: str, code: str, message: str) -> InvalidInput:
        """One offending field."""
        return cls(f"{path}: {message}", code=code, errors=[{"path": path, "code": code, "message": message}])

    @classmethod
    def fields(cls, errors: list[dict[str, str]]) -> InvalidInput:
        """Several offending fields; if they all have one code, and it says something, it is the problem's."""
        codes = {each["code"] for each in errors}
        code = codes.pop() if len(codes) == 1 and codes != {"invalid"} else None
        return cls("; ".join(f"{each['path']}: {each['message']}" for each in errors), code=code, errors=errors)


class NotSupported(InvalidInput):
    title, default_code = "Not supported yet", "not_supported"


class UpgradeRequired(ApiProblem):
    status, title, default_code = 426, "Upgrade required", "upgrade_required"


class TooManyRequests(ApiProblem):
    status, title, default_code = 429, "Too many requests", "too_many_requests"


class HeadersTooLarge(ApiProblem):
    status, title, default_code = 431, "Request header fields too large", "headers_too_large"


class Unavailable(ApiProblem):
    status, title, default_code = 503, "Unavailable", "unavailable"


class OutcomeUnknown(Unavailable):
    title, default_code = "Outcome unknown", "outcome_unknown"


class ObjectLost(Unavailable):
    """Storage is there, and what it was given is not: another try does not help."""

    title, default_code = "Lost", "object_lost"


class PartitionMissing(Unavailable):
    """History has no partition for the day of a run. The servers create the partition, so a retry succeeds."""

    title, default_code = "Partition missing", "partition_missing"


class Contention(Unavailable):
    title, default_code = "Busy", "contention"


class ServerFault(ApiProblem):
    """A bug or a fault that no other class names."""
