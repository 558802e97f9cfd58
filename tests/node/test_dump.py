"""A stolen dump: `pg_dump` of a database that was used, and nothing in it opens a door or tells a secret."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import asyncpg
import httpx
import msgspec
import pytest

from tests.conftest import Api, Cluster, InProcess
from tests.flow.kit import PROCESS, WorkerHand
from tocsin.flow.keys import RunTokens
from tocsin.model.access import ROLES
from tocsin.node.assemble import Node
from tocsin.node.server.app import build
from tocsin.node.server.login import SESSION, _Session
from tocsin.settings import Settings
from tocsin.store.vault import context_of, new_key, seal

SECRET, CARD, NOTE, WORDS = "a-canary/nobody+sees", "4111-canary-1111", "noted-canary-77", "said-canary to nobody"
PLAIN = "everybody may see this"
RULE = {"claim": "sub", "equals": "mallory", "tenant": "default", "role": "platform"}


@pytest.fixture
def master() -> bytes:
    return new_key()


@pytest.fixture
async def node(settings: Settings, master: bytes) -> AsyncIterator[Node]:
    """A server with a master key, all loops running."""
    environ = {"TOCSIN_MASTER_KEY": base64.b64encode(master).decode()}
    node = Node(Settings.load(environ, home=settings.home, database_url=settings.database_url))
    await node.start()
    yield node
    await node.stop()


def forms(secret: bytes) -> Iterator[bytes]:
    """How it could stand in a dump: as it is, quoted, encoded wherever that begins, or as a hash that needs no key."""
    yield secret
    for hexed in (secret.hex(), hashlib.sha256(secret).hexdigest(), hashlib.md5(secret).hexdigest()):  # noqa: S324
        yield from (hexed.encode(), hexed.upper().encode())
    yield base64.b32encode(secret).rstrip(b"=")
    yield base64.b64encode(hashlib.sha256(secret).digest())
    for shift in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            # Without the characters at both ends that depend on what stands beside it.
            yield encode(b"\0" * shift + secret).rstrip(b"=")[(0, 2, 3)[shift] : -1]
    if (text := secret.decode("utf-8", "ignore")).encode() == secret:
        yield from (quote(text, safe="").encode(), json.dumps(text)[1:-1].encode(), text[::-1].encode())


def test_every_form_is_found() -> None:
    secret = SECRET.encode()
    for text in (secret, secret.hex(), base64.b64encode(b"xy" + secret + b"z"), base64.b64encode(b"x" + secret)):
        dump = text if isinstance(text, bytes) else text.encode()
        assert any(form in b"one\t" + dump + b"\ttwo" for form in forms(secret)), dump
        assert all(len(form) >= 20 for form in forms(secret))


async def test_a_dump_of_the_database_holds_no_usable_key_and_no_secret(
    node: Node, cluster: Cluster, master: bytes
) -> None:
    api = Api(node, cluster.keys["key"])
    secrets = [*await use_keys(api), *await use_secrets(api), master]
    await node.authenticator.note_used()
    database = urlsplit(node.settings.database_url).path.lstrip("/")
    dump = await dumped(cluster, database)
    assert PLAIN.encode() in dump and dump.count(b"COPY tocsin.") >= 30, "it is a dump of what was used"
    for secret in secrets:
        found = [form for form in forms(secret) if form in dump]
        assert not found, (secret[:12], found)
    # Nor what the stored hashes are made with: with the dump alone no guess at a key can be checked.
    for pepper in list(node.key_hashes._peppers.values())[:1]:
        assert not [form for form in forms(pepper) if form in dump]
    connection = await asyncpg.connect(cluster.as_superuser(database), server_settings={"search_path": "tocsin"})
    made = await connection.fetch("select hashed_by from api_keys where name not like 'tocsin up%'")
    await connection.close()
    assert len(made) > len(ROLES) and {row["hashed_by"] for row in made} == {node.key_hashes.first}


async def test_without_a_master_key_a_dump_opens_nothing_that_lasts(
    settings: Settings, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"issuer": "https://login.example.com", "audience": "tocsin", "rules": [RULE]}
    node = Node(replace(settings, oidc=json.dumps({"issuers": [told]})))
    await node.start()
    try:
        assert capsys.readouterr().out.count("there is no master key") == 1
        api = Api(node, cluster.keys["key"])
        keys = await use_keys(api)
        run = await claimed_run(api)
        dump = await dumped(cluster, urlsplit(node.settings.database_url).path.lstrip("/"))
        for secret in (*keys, run["token"].encode()):
            assert not [form for form in forms(secret) if form in dump], secret[:12]
        stolen = await node.db.fetchval("engine", "select token_key from cluster")
        assert stolen.hex().encode() in dump
        await try_sessions(node, stolen, told["issuer"])
        await try_run_tokens(node, stolen, run)
    finally:
        await node.stop()


async def claimed_run(api: Api) -> Any:
    """A run under way, of which its worker knows the token."""
    job = await api.post("/v1/jobs", {"target": PROCESS, "schedule": {"manual": True}})
    await api.post(f"/v1/jobs/{job['id']}/runs")
    worker = await WorkerHand.register(api.node, (await api.post("/v1/keys", {"role": "worker"}))["key"])
    [run] = (await worker.claim(1, wait=50))["runs"]
    return run


async def try_sessions(node: Node, stolen: bytes, issuer: str) -> None:
    """Cookies sealed with whatever the database holds are nobody's."""
    now = time.time()
    session = _Session(issuer, "mallory", ["sub is mallory"], now + 86_400, "x", now)
    for key in (stolen, hmac.digest(stolen, b"sessions", "sha256")):
        sealed = seal(key, msgspec.json.encode(session), context_of("cookie", SESSION))
        cookie = f"{SESSION}={base64.urlsafe_b64encode(sealed).rstrip(b'=').decode()}"
        async with httpx.AsyncClient(transport=InProcess(build(node)), base_url="http://localhost") as browser:
            assert (await browser.get("/v1/tenants", headers={"cookie": cookie})).status_code == 401


async def try_run_tokens(node: Node, stolen: bytes, run: Any) -> None:
    """A token that is signed with it speaks for an attempt under way, which is said at the start, and not beyond."""
    tokens = RunTokens([stolen])
    forged = Api(node, tokens.make(1, run["run_id"], run["fence"]))
    assert (await forged.http.get("/v1/jobs")).status_code == 401
    await forged.post(f"/v1/runs/{run['run_id']}/complete", {"result": 1})
    for path, body in (("complete", {"outcome": "failed"}), ("parents", None)):
        method = "GET" if body is None else "POST"
        again = await forged.call(method, f"/v1/runs/{run['run_id']}/{path}", json=body, expect=409)
        assert again["code"] == "superseded"


async def use_keys(api: Api) -> list[bytes]:
    """Make, use, rotate and revoke keys of every role."""
    made = [await api.post("/v1/keys", {"role": role, "name": f"of {role}"}) for role in ROLES]
    rotated = await api.post(f"/v1/keys/{made[0]['id']}/rotate", headers={"idempotency-key": "once"})
    for key in (*made, rotated):
        await Api(api.node, key["key"]).http.get("/v1/jobs")
    await api.delete(f"/v1/keys/{made[1]['id']}")
    keys = [key["key"].encode() for key in (*made, rotated)]
    return keys + [key.removeprefix(b"tcn_")[:43] for key in keys]


async def use_secrets(api: Api) -> list[bytes]:
    """Run a job with a secret and sensitive arguments, whose attempts say both in notes, and one in its result; the
    other one runs on."""
    await api.call("PUT", "/v1/secrets/billing", json={"value": SECRET})
    spec = {"target": PROCESS | {"stdin": WORDS}, "schedule": {"manual": True}, "secrets": {"TOKEN": "billing"}}
    job = await api.post("/v1/jobs", spec | {"sensitive": True, "description": PLAIN})
    for name in ("ended", "running"):
        headers = {"idempotency-key": name}
        await api.post(f"/v1/jobs/{job['id']}/runs", {"args": {"card": CARD}}, headers=headers)
    key = await api.post("/v1/keys", {"role": "worker"})
    worker = await WorkerHand.register(api.node, key["key"])
    claimed = await worker.claim(1, wait=50)
    runs = claimed["runs"] + (await worker.claim(1, last_claim=claimed["claim_id"], wait=50))["runs"]
    for run in runs:
        assert (run["secrets"]["TOKEN"], run["args"]["card"]) == (SECRET, CARD)
        noted = {k: run[k] for k in ("run_id", "attempt", "fence")} | {"checkpoint": {"at": NOTE, "with": SECRET}}
        assert (await worker.say("notes", {"notes": [noted]}))["kept"]
    result = {"echo": f"{SECRET} {CARD}", "shown": PLAIN}
    await Api(api.node, runs[0]["token"]).post(f"/v1/runs/{runs[0]['run_id']}/complete", {"result": result})
    tokens = [run["token"] for run in runs]
    told = (*tokens, *(token.rpartition(".")[2] for token in tokens), key["key"], SECRET, CARD, NOTE, WORDS)
    return [secret.encode() for secret in told]


async def dumped(cluster: Cluster, database: str) -> bytes:
    program = cluster.server._installation.program("pg_dump")
    asked = await asyncio.create_subprocess_exec(
        program, "--dbname", cluster.as_superuser(database), stdout=asyncio.subprocess.PIPE
    )
    dump, _ = await asked.communicate()
    assert asked.returncode == 0
    return dump
