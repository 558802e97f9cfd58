"""Targets that name an image: what is taken, what its defaults are, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tocsin.errors import InvalidInput
from tocsin.model.job import JobSpec, check

DIGEST = "@sha256:" + "0" * 64


def spec(**target: Any) -> JobSpec:
    return msgspec.convert({"target": {"image": "busybox", **target}}, JobSpec)


@pytest.mark.parametrize(
    "image", ["busybox", "busybox:1.36", "ghcr.io/a/b_c:v1", "localhost:5000/x:1" + DIGEST, "registry/ns/x" + DIGEST]
)
@pytest.mark.parametrize("kind", ["container", "kubernetes"])
def test_images(kind: str, image: str) -> None:
    check(spec(kind=kind, image=image))


@pytest.mark.parametrize("image", ["", " x", "x y", "x\n", "-x", "../x", "x:", "x;y", "x" * 513, "é"])
@pytest.mark.parametrize("kind", ["container", "kubernetes"])
def test_what_is_no_image(kind: str, image: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.target\.image"):
        spec(kind=kind, image=image)


def test_defaults() -> None:
    container: Any = msgspec.to_builtins(spec(kind="container").target)
    assert container == {
        "kind": "container",
        "image": "busybox",
        "command": [],
        "env": {},
        "network": "none",
        "pull": "missing",
    }
    cluster: Any = msgspec.to_builtins(spec(kind="kubernetes").target)
    assert cluster == {
        "kind": "kubernetes",
        "image": "busybox",
        "command": [],
        "env": {},
        "namespace": None,
        "service_account": None,
        "pull": "missing",
    }


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ({"kind": "container", "network": "host"}, "network"),
        ({"kind": "container", "privileged": True}, "privileged"),
        ({"kind": "container", "pull": "sometimes"}, "pull"),
        ({"kind": "kubernetes", "namespace": "Kube_System"}, "namespace"),
        ({"kind": "kubernetes", "namespace": "a/b"}, "namespace"),
        ({"kind": "kubernetes", "service_account": "a b"}, "service_account"),
        ({"kind": "container", "command": "sh -c true"}, "command"),
    ],
)
def test_what_no_document_may_say(target: dict[str, Any], path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=path):
        spec(**target)


@pytest.mark.parametrize("kind", ["container", "kubernetes"])
@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"command": [""]}, "target.command[0]"),
        ({"command": ["a\0b"]}, "target.command"),
        ({"command": ["x" * 131_073]}, "target.command"),
        ({"env": {"TOCSIN_RUN_TOKEN": "x"}}, "target.env.TOCSIN_RUN_TOKEN"),
        ({"env": {"A=B": "x"}}, "target.env.A=B"),
        ({"env": {"A": "\0"}}, "target.env.A"),
    ],
)
def test_what_no_program_can_be_given(kind: str, fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check(spec(kind=kind, **fields))
    assert [error["path"] for error in refused.value.errors] == [path]
