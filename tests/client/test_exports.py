"""The public surface is what it says, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tocsin
import tocsin.client

PUBLIC = ["App", "AsyncClient", "Client", "Context", "GiveUp", "Retry", "__version__", "errors"]


def test_the_public_names() -> None:
    assert sorted(tocsin.__all__) == PUBLIC
    assert dir(tocsin) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there(name: str) -> None:
    assert getattr(tocsin, name) is not None


@pytest.mark.parametrize("name", tocsin.client.__all__)
def test_each_name_of_the_client_is_there(name: str) -> None:
    assert getattr(tocsin.client, name).__name__ == name


@pytest.mark.parametrize("module", [tocsin, tocsin.client])
def test_other_names_are_not(module: object) -> None:
    with pytest.raises(AttributeError, match="Klient"):
        module.Klient  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert tocsin.__version__ == project["project"]["version"]


def loaded(statement: str) -> set[str]:
    """The modules a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_it_loads_nothing_heavy() -> None:
    modules = loaded("import tocsin")
    assert not modules & {"httpx", "asyncpg", "aiohttp", "msgspec", "starlette", "typer", "asyncio"}
    assert {m for m in modules if m.startswith("tocsin")} == {"tocsin"}


def test_a_job_function_does_not_need_httpx() -> None:
    modules = loaded("from tocsin import App, Context, GiveUp")
    assert not modules & {"httpx", "asyncpg", "starlette", "tocsin.store", "tocsin.node"}
