"""Which kinds of targets this worker can run: one line for each executor.

An executor belongs here with the commit that makes it work; the server takes jobs of its kind (`model/targets.py`) from
then on. A heavy library is imported by its executor's module alone, and such a module only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tocsin.errors import SetupError
from tocsin.settings import Settings
from tocsin.worker.executors import Executor
from tocsin.worker.proctree import Family


class Place(NamedTuple):
    """Where a worker works: what executors are made from."""

    url: str
    slots: int
    module: str | None
    family: Family
    settings: Settings


def executors(place: Place) -> dict[str, Executor]:
    """An executor for each kind that can run here, as far as that is known before it is opened."""
    made = (make(place) for make in _MAKERS)
    return {executor.kind: executor for executor in made if executor is not None}


def _process(place: Place) -> Executor:
    from tocsin.worker.executors.process import ProcessExecutor

    return ProcessExecutor(place.url, place.family)


def _python(place: Place) -> Executor | None:
    if place.module is None:
        return None
    from tocsin.worker.executors.python import PythonExecutor

    return PythonExecutor(place.module, place.slots, place.url, place.family)


def _container(place: Place) -> Executor | None:
    if not place.settings.container_engine:
        return None
    from tocsin.worker.executors.container import ContainerExecutor

    return ContainerExecutor(place.settings.container_engine, place.url)


def _http(place: Place) -> Executor:
    from tocsin.worker.executors.http import HttpExecutor

    return HttpExecutor(place.url, inside=place.settings.http_private)


def _kubernetes(place: Place) -> Executor | None:
    settings = place.settings
    if not settings.kubernetes:
        return None
    try:
        from tocsin.worker.executors.kubernetes import KubernetesExecutor
    except ImportError as exc:
        raise SetupError(f"for Kubernetes install tocsin[kubernetes] ({exc})") from exc
    namespaces, accounts = _names(settings.kubernetes_namespaces), _names(settings.kubernetes_service_accounts)
    if not namespaces:
        raise SetupError("kubernetes_namespaces must name at least one")
    return KubernetesExecutor(settings.kubernetes, namespaces, accounts, place.url)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_MAKERS: tuple[Callable[[Place], Executor | None], ...] = (_process, _python, _http, _container, _kubernetes)
