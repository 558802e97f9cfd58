"""schemathesis over the served document, on a real server, as an editor, without a worker.

`make test` gives it some seconds and a fixed seed; `make fuzz MINUTES=10` the time you say and a seed of chance,
which it prints.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from pathlib import Path

import httpx

from tests.cluster.cluster import Site
from tests.conftest import Cluster

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
    "ensure_resource_availability",
)
SHORT = ["--phases=examples,coverage,fuzzing", "--seed=1", "--max-examples=8", "--max-time=25", "--no-shrink"]
LONG = ["--phases=examples,coverage,fuzzing,stateful", f"--max-time={int(MINUTES * 60)}", "--continue-on-failure"]


async def test_no_answer_breaks_the_contract(cluster: Cluster, database_url: str, tmp_path: Path) -> None:
    master_key = base64.b64encode(bytes(32)).decode()  # without one, secrets are a server's error
    with Site(tmp_path, database_url, cluster.keys, master_key=master_key) as site:
        server = await site.server("fuzzed")
        platform = {"authorization": f"Bearer {cluster.keys['key']}"}
        async with httpx.AsyncClient(base_url=server.url, headers=platform) as http:
            editor = (await http.post("/v1/keys", json={"role": "editor"})).json()["key"]
        fuzz = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--header", f"Authorization: Bearer {editor}"),
            *("--request-timeout=10", "--warnings=off", "--output-sanitize=false"),
            *("--exclude-path", "/v1/events"),  # an answer without an end
            *("--exclude-path", "/v1/runs/{id}/logs/stream"),  # the same, while the run has none
            *(LONG if MINUTES else SHORT),
            cwd=tmp_path,
            stdout=None if MINUTES else asyncio.subprocess.PIPE,
        )
        said, _ = await fuzz.communicate()
        assert fuzz.returncode == 0, (said or b"").decode()[-20_000:]
        assert server.said("request failed") == 0, server.log.read_text()[-5000:]
