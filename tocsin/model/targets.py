"""The targets of a job document: what is to be run, one struct for each kind, and what of it makes no sense."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct, field, structs

from tocsin.model.httpcall import wrong_call

Line = Annotated[str, Meta(max_length=1024)]

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
# What would let a job document change which program runs, or pose as the worker.
_ENV_REFUSED = re.compile(r"(LD_|DYLD_|TOCSIN_).*|PATH|IFS|PYTHONPATH|PYTHONHOME", re.ASCII)
_LONGEST_COMMAND = 131_072
Words = Annotated[list[str], Meta(max_length=1000)]
Image = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9._:/@-]{0,510}[a-zA-Z0-9])?(?!\n)$")]
Pull = Literal["missing", "always", "never"]


class _Part(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class ProcessTarget(_Part, frozen=True, tag_field="kind", tag="process"):
    """A program and its arguments, run on the worker in a process group of its own. With `shell`, the first word is a
    line for `/bin/sh`, and the others are its `$1`, `$2` and so on; the line may also stand alone, as a string.
    `sandbox`: only on workers that have one; there the system is read-only and there is no network."""

    command: (
        Annotated[list[str], Meta(min_length=1, max_length=1000)]
        | Annotated[str, Meta(min_length=1, max_length=_LONGEST_COMMAND)]
    )
    env: dict[str, str] = {}
    cwd: Line | None = None
    stdin: Annotated[str, Meta(max_length=65_536)] | None = None
    shell: bool = False
    sandbox: bool = False

    @property
    def words(self) -> list[str]:
        """The program, or the shell's line, and its arguments."""
        return [self.command] if isinstance(self.command, str) else self.command


class PythonTarget(_Part, frozen=True, tag_field="kind", tag="python"):
    """A function registered by the worker's module."""

    function: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*(?!\n)$", max_length=256)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class HttpTarget(_Part, frozen=True, tag_field="kind", tag="http"):
    """A request that a worker sends; which answers are a success, `expect_status` says (`2xx`, `404`).

    Without a `body`, methods that have one send the run's arguments as JSON. `redirects`: how many are followed at
    most. `sign_with`: the name, in the job's `secrets`, of the secret that signs it (Standard Webhooks). `callback`:
    the request carries a token, and an answer of 202 leaves the run running until `…/complete` is called with it."""

    url: Annotated[str, Meta(min_length=1, max_length=8192)]
    method: Annotated[str, Meta(pattern=r"^[A-Z]{1,32}(?!\n)$")] = "POST"
    headers: Annotated[dict[str, str], Meta(max_length=100)] = {}
    body: Any = None
    expect_status: Annotated[
        list[Annotated[str, Meta(pattern=r"^[1-5](xx|[0-9]{2})(?!\n)$")]], Meta(min_length=1, max_length=50)
    ] = field(default_factory=lambda: ["2xx"])
    redirects: Annotated[int, Meta(ge=0, le=10)] = 0
    sign_with: Annotated[str, Meta(max_length=128)] | None = None
    callback: bool = False


class ContainerTarget(_Part, frozen=True, tag_field="kind", tag="container"):
    """An image, run by the container engine of the worker's machine. `command`: the program and its arguments, instead
    of the image's own."""

    image: Image
    command: Words = []
    env: dict[str, str] = {}
    network: Literal["none", "bridge"] = "none"
    pull: Pull = "missing"


class KubernetesTarget(_Part, frozen=True, tag_field="kind", tag="kubernetes"):
    """An image, run as a Job of the worker's cluster, in one of the namespaces that the worker is given."""

    image: Image
    command: Words = []
    env: dict[str, str] = {}
    namespace: Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(?!\n)$")] | None = None
    service_account: Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(?!\n)$")] | None = None
    pull: Pull = "missing"


WORKFLOW_POOL = "workflows"  # of heads; no worker is in it, the servers take from it themselves


class WorkflowTarget(_Part, frozen=True, tag_field="kind", tag="workflow"):
    """The jobs of a workflow and what they wait for, as `model.workflow` writes and reads them: what the runs of the
    job that stands for the whole are made of. No worker runs it, and only /v1/workflows makes it."""

    jobs: dict[str, Any]


WorkerTarget: TypeAlias = ProcessTarget | PythonTarget | HttpTarget | ContainerTarget | KubernetesTarget
Target: TypeAlias = WorkerTarget | WorkflowTarget


# What a target says to what it runs, and what stands there when that is kept elsewhere.
_CONTENT: dict[str, Any] = {"args": [], "kwargs": {}, "body": None, "stdin": None}


def content_of(target: Target) -> dict[str, Any]:
    """What the target says to what it runs, as far as it says something."""
    return {name: value for name, blank in _CONTENT.items() if (value := getattr(target, name, blank)) != blank}


def with_content(target: Target, content: Mapping[str, Any]) -> Target:
    """The same target saying this and nothing else; what its kind cannot say is left out."""
    return structs.replace(
        target, **{name: content.get(name, blank) for name, blank in _CONTENT.items() if hasattr(target, name)}
    )


def kind_of(target: Target) -> str:
    """The target's `kind`."""
    return str(type(target).__struct_config__.tag)


def ability_for(target: Target) -> str:
    """What a worker must have said that it can run: the target's kind, or a harder form of it."""
    return "sandbox" if isinstance(target, ProcessTarget) and target.sandbox else kind_of(target)


def wrong_target(target: Target, secrets: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """What decodes, but no worker could run: the path of each such field, and why. `secrets`: the names under which
    the job has some."""
    if isinstance(target, ProcessTarget):
        yield from _wrong_process(target)
    elif isinstance(target, HttpTarget):
        yield from wrong_call(target, secrets)
    elif isinstance(target, ContainerTarget | KubernetesTarget):
        yield from _wrong_image(target)


def _wrong_process(target: ProcessTarget) -> Iterator[tuple[str, str]]:
    if "\0" in "".join((target.cwd or "", target.stdin or "")):
        yield "target.stdin", "a NUL character cannot be passed to a program"
    if target.sandbox and target.cwd is not None:
        yield "target.cwd", "a program in a sandbox has a folder of its own: naming another would let it look out"
    if isinstance(target.command, str) and not target.shell:
        yield "target.command", "is a list of the program and its arguments; one line of text needs shell: true"
    if not target.words[0].strip():
        yield "target.command[0]", "names no program"
    yield from wrong_command(target.words)
    yield from wrong_env(target.env)


def _wrong_image(target: ContainerTarget | KubernetesTarget) -> Iterator[tuple[str, str]]:
    if target.command and not target.command[0]:
        yield "target.command[0]", "names no program"
    yield from wrong_command(target.command)
    yield from wrong_env(target.env)


def wrong_command(command: list[str]) -> Iterator[tuple[str, str]]:
    """Words that no program can be given."""
    if any("\0" in word for word in command):
        yield "target.command", "a NUL character cannot be passed to a program"
    if sum(map(len, command)) > _LONGEST_COMMAND:
        yield "target.command", "is longer than 128 KiB"


def wrong_env(env: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Variables that no program can be given, or that a job may not set."""
    if len(env) > 200 or sum(map(len, env.values())) > 65_536:
        yield "target.env", "holds more than 200 names or 64 KiB"
    for key, value in env.items():
        if not may_be_set(key) or "\0" in value:
            yield f"target.env.{key[:64]}", "is not a name that a job may set"


def may_be_set(variable: str) -> bool:
    """Whether a job may set this variable of its environment."""
    return _ENV_NAME.fullmatch(variable) is not None and _ENV_REFUSED.fullmatch(variable) is None
