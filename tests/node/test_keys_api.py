"""Tenants and keys over HTTP: repeats with an Idempotency-Key have one effect."""

from __future__ import annotations

import asyncio

from tests.conftest import Api


async def test_a_repeated_tenant_is_the_same_tenant(still_api: Api) -> None:
    headers = {"idempotency-key": "t"}
    told = await asyncio.gather(
        *(still_api.post("/v1/tenants", {"slug": "blue", "weight": 3}, headers=headers) for _ in range(5))
    )
    assert all(one == told[0] for one in told) and told[0]["slug"] == "blue"
    await still_api.post("/v1/tenants", {"slug": "blue"}, expect=409)
    await still_api.post("/v1/tenants", {"slug": "green"}, headers=headers, expect=422)


async def test_a_repeated_key_is_made_once_and_shown_once(still_api: Api) -> None:
    headers = {"idempotency-key": "k"}
    first = await still_api.post("/v1/keys", {"role": "viewer", "name": "ci"}, headers=headers)
    again = await still_api.post("/v1/keys", {"role": "viewer", "name": "ci"}, headers=headers)
    assert first["key"] and again == first | {"key": None}
    made = [key for key in (await still_api.get("/v1/keys"))["items"] if key["name"] == "ci"]
    assert [key["id"] for key in made] == [first["id"]]
