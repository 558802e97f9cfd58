"""A Job of a cluster outlives its worker: one that is restarted, or killed, has its run go on with the same pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Cluster
from tests.worker.kubecluster import Cluster as Kubernetes
from tocsin.client import AsyncClient

from .cluster import Site

# It starts once, and never a second time.
SCRIPT = "mkdir {once} || exit 9; echo up; while [ ! -e {go} ]; do sleep 0.05; done; echo done"


@pytest.mark.parametrize("way", ["killed", "restarted"])
async def test_a_run_goes_on_with_its_pod(cluster: Cluster, database_url: str, tmp_path: Path, way: str) -> None:
    async with Kubernetes() as kubernetes:
        with Site(tmp_path, database_url, cluster.keys, lease=4, heartbeat=0.5) as site:
            server = await site.server("s")
            worker = await site.worker("w", server, module=None, start=False)
            worker.env |= {"TOCSIN_KUBERNETES": kubernetes.kubeconfig(tmp_path), "TOCSIN_DRAIN_SECONDS": "0.1"}
            await worker.start()
            async with AsyncClient(server.url, site.keys["key"]) as client:
                script = SCRIPT.format(once=tmp_path / "once", go=tmp_path / "go")
                target = {"kind": "kubernetes", "image": "busybox", "command": ["sh", "-c", script]}
                # A single attempt: to lose a worker is no failure of the job.
                document = {"target": target, "schedule": {"manual": True}, "retry": {"max_attempts": 1}}
                run = await client.run_job((await client.create_job(document))["id"])
                await kubernetes.until(lambda: any(b"up" in pod.log for pod in kubernetes.pods.values()))
                (pod,) = kubernetes.pods.values()
                labels = dict(pod.thing["metadata"]["labels"])
                if way == "killed":
                    worker.kill()
                else:
                    worker.terminate()
                    assert await worker.ended(60) == 0
                await worker.start()
                await kubernetes.until(lambda: pod.thing["metadata"]["labels"] != labels)
                (tmp_path / "go").touch()
                ended = await client.wait(run["id"])
                assert ended["state"] == "succeeded" and ended["attempt"] >= 2
                logs = [line["text"] async for line in client.logs(run["id"])]
                assert logs[0].startswith("[tocsin: an earlier attempt lost its worker") and logs[1:] == ["up", "done"]
                await kubernetes.until(lambda: not kubernetes.jobs)
