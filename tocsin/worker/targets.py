"""What a worker reads of a job's document. Unlike the server, it ignores fields that it does not know, so that a newer
server can speak to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct, field


class ProcessTarget(Struct, tag_field="kind", tag="process"):
    """A program."""

    command: list[str] | str
    env: dict[str, str] = {}
    cwd: str | None = None
    stdin: str | None = None
    shell: bool = False
    sandbox: bool = False

    @property
    def words(self) -> list[str]:
        """The program, or the shell's line, and its arguments."""
        return [self.command] if isinstance(self.command, str) else self.command


class PythonTarget(Struct, tag_field="kind", tag="python"):
    """A function of the worker's module."""

    function: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class HttpTarget(Struct, tag_field="kind", tag="http"):
    """A request."""

    url: str
    method: str = "POST"
    headers: dict[str, str] = {}
    body: Any = None
    expect_status: list[str] = field(default_factory=lambda: ["2xx"])
    redirects: int = 0
    sign_with: str | None = None
    callback: bool = False


class ContainerTarget(Struct, tag_field="kind", tag="container"):
    """An image, by the machine's container engine."""

    image: str
    command: list[str] = []
    env: dict[str, str] = {}
    network: str = "none"
    pull: str = "missing"


class KubernetesTarget(Struct, tag_field="kind", tag="kubernetes"):
    """An image, as a Job of a cluster."""

    image: str
    command: list[str] = []
    env: dict[str, str] = {}
    namespace: str | None = None
    service_account: str | None = None
    pull: str = "missing"


Target = ProcessTarget | PythonTarget | HttpTarget | ContainerTarget | KubernetesTarget


class Resources(Struct, frozen=True):
    """What the run was given of its worker; where the executor can, it is held to that. 0: nothing was said."""

    cpu: float = 0
    memory_mb: int = 0
    disk_mb: int = 0
    gpus: int = 0

    def enforced(self, how: Mapping[str, str | bool] | None = None) -> dict[str, str | bool]:
        """For `usage["enforced"]`: how each limit that was asked for is held; False: not at all."""
        asked = (name for name in self.__struct_fields__ if getattr(self, name))
        return {name: how.get(name, False) if how else False for name in asked}


NO_RESOURCES = Resources()


class Spec(Struct):
    """The part of a job's document that a worker acts on."""

    target: Target
    resources: Resources = NO_RESOURCES

    @property
    def kind(self) -> str:
        """The target's kind."""
        return str(type(self.target).__struct_config__.tag)


def filled(raw: msgspec.Raw, content: Mapping[str, Any]) -> msgspec.Raw:
    """A job's document with what its target says, where that did not come with it."""
    document = _codec(raw).decode(raw)
    document["target"] |= content
    return msgspec.Raw(msgspec.msgpack.encode(document))


def _codec(raw: msgspec.Raw) -> Any:
    """In msgpack or, from a server that answers so, in JSON."""
    return msgspec.json if bytes(raw)[:1] == b"{" else msgspec.msgpack


class _AnyTarget(Struct):
    kind: str


class _AnySpec(Struct):
    target: _AnyTarget


def read_spec(raw: msgspec.Raw | None) -> Spec | str:
    """A job's document; or what is wrong with it."""
    if raw is None:
        return "the run came without its job's document"
    codec = _codec(raw)
    try:
        spec: Spec = codec.decode(raw, type=Spec)
        if spec.resources == NO_RESOURCES:
            spec.resources = NO_RESOURCES  # so that an `is` tells
        return spec
    except msgspec.MsgspecError as exc:
        why = str(exc)
    try:
        kind = codec.decode(raw, type=_AnySpec).target.kind
    except msgspec.MsgspecError:
        return f"the job's document cannot be read: {why}"
    return f"this worker cannot read the job's target of kind {kind}: {why}"
