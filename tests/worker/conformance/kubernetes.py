"""Jobs of a cluster; the cluster is a mock of our own (`kubecluster.py`), whose pods are processes of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..kubecluster import Cluster
from .harness import Deed
from .process import ProcessHarness


class KubernetesHarness(ProcessHarness):
    kind = "kubernetes"
    outlives_workers = True

    def __init__(self, where: Path) -> None:
        super().__init__(where / "pids")
        self.where.mkdir()
        self._cluster = Cluster()

    async def __aenter__(self) -> KubernetesHarness:
        await self._cluster.__aenter__()
        self.worker = {"settings": {"kubernetes": self._cluster.kubeconfig(self.where.parent)}}  # type: ignore[misc]
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._cluster.__aexit__(*exc)

    def target(self, deed: Deed) -> dict[str, Any]:
        return {**super().target(deed), "kind": "kubernetes", "image": "busybox"}
