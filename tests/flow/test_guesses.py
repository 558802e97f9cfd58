"""Nothing that is kept lets one who reads the database confirm a guess at what is sensitive: digests are keyed."""

from __future__ import annotations

import hashlib
from typing import Any

from tests.flow.kit import PROCESS, Scene
from tests.flow.test_payloads import run
from tests.flow.test_secrets import settings
from tocsin.flow.shared.idempotency import digest
from tocsin.model.limits import key_id

__all__ = ["settings"]


async def guessed(scene: Scene, *guesses: bytes) -> Any:
    return await scene.value("select count(*) from idempotency where digest = any($1)", list(guesses))


async def test_the_digest_of_a_sensitive_call_tells_nothing(scene: Scene) -> None:
    job = await scene.job(sensitive=True)
    body = {"args": {"pin": "1234"}}
    sent = await scene.api.http.post(f"/v1/jobs/{job['id']}/runs", json=body, headers={"idempotency-key": "k"})
    guess = digest("POST", f"/v1/jobs/{job['id']}/runs", sent.request.content)
    assert await guessed(scene, guess) == 0
    assert (await run(scene, job, 422, {"idempotency-key": "k"}, args={"pin": "4321"}))[
        "code"
    ] == "idempotency_mismatch"


async def test_the_digest_of_a_change_to_a_sensitive_job_tells_nothing(scene: Scene) -> None:
    target = {"kind": "python", "function": "pay", "kwargs": {"pin": "1234"}}
    job = await scene.job(sensitive=True, target=target)
    path, body, headers = f"/v1/jobs/{job['id']}", {"target": {"kwargs": {"pin": "5678"}}}, {"idempotency-key": "k"}
    first = await scene.api.http.patch(path, json=body, headers=headers)
    again = await scene.api.http.patch(path, json=body, headers=headers)
    assert (first.status_code, again.status_code) == (200, 200) and again.headers["idempotent-replayed"] == "true"
    assert await guessed(scene, digest("PATCH", path, first.request.content)) == 0


async def test_nor_do_the_audit_and_the_versions_of_its_document(scene: Scene) -> None:
    target = {"kind": "python", "function": "pay", "args": [], "kwargs": {"pin": "1234"}}
    specs = [(await scene.job(sensitive=sensitive, target=target))["id"] for sensitive in (True, False)]
    for job_id in specs:
        await scene.api.call("PATCH", f"/v1/jobs/{job_id}", json={"priority": 7})
    sealed, plain = [
        [row["spec"] for row in await scene.rows("select spec from job_versions where job_id = $1", job_id)]
        for job_id in specs
    ]
    # What one who knows all but the value would try: the documents as they are, had it not been sealed.
    guess = await scene.value("select spec from jobs where id = $1", specs[1])
    guess = guess.replace('"sensitive":false', '"sensitive":true')
    assert "1234" in str(plain) and "1234" not in str(sealed)
    digests = [row["after"] for row in await scene.rows("select after from audit where after is not null")]
    assert len(digests) == 4 and hashlib.sha256(guess.encode()).digest() not in digests


async def test_a_repeat_is_known_by_whatever_key_it_was_remembered_under(scene: Scene) -> None:
    body, headers = {"target": PROCESS, "schedule": {"manual": True}}, {"idempotency-key": "k"}
    made = await scene.api.call("POST", "/v1/jobs", json=body, headers=headers)
    mine = scene.node.wish_keys
    scene.node.wish_keys = [bytes(32), *mine]  # a new master key
    assert (await scene.api.call("POST", "/v1/jobs", json=body, headers=headers))["id"] == made["id"], (
        "a new master key"
    )
    await scene.sql.execute("delete from idempotency")
    scene.node.wish_keys = []  # the first one is still to come
    made = await scene.api.call("POST", "/v1/jobs", json=body, headers=headers)
    scene.node.wish_keys = mine
    assert (await scene.api.call("POST", "/v1/jobs", json=body, headers=headers))["id"] == made["id"]


async def test_a_concurrency_key_tells_nothing_of_sensitive_arguments_and_yet_holds(scene: Scene) -> None:
    job = await scene.job(concurrency_key="{args.iban}")
    for sensitive in (True, True, False):
        await run(scene, job, args={"iban": "DE02"}, sensitive=sensitive)
    *keys, plain = [row["key_id"] for row in await scene.rows("select key_id::text from runs order by id")]
    tenant_id = await scene.value("select tenant_id from jobs")
    assert keys[0] == keys[1] != plain == key_id(tenant_id, "DE02")
    assert len(await scene.take()) == 2, "one of the two that share a key, and the other"
