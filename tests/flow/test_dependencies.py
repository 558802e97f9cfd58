"""Jobs that depend on jobs: which graphs there may be, whoever makes them, and what is kept of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.flow.kit import PROCESS, Scene
from tocsin.model.graph import DEEPEST, MOST_PARENTS

CRON, OTHER_CRON = {"cron": "0 3 * * *"}, {"cron": "0 4 * * *"}


async def child(scene: Scene, *parents: Any, expect: int = 201, **spec: Any) -> Any:
    body = {"target": PROCESS, "depends_on": list(parents)} | spec
    return await scene.api.post("/v1/jobs", body, expect=expect)


async def patch(scene: Scene, job: dict[str, Any], expect: int = 200, **body: Any) -> Any:
    return await scene.api.call("PATCH", f"/v1/jobs/{job['id']}", json=body, expect=expect)


async def edges(scene: Scene) -> set[tuple[str, str, str, int, str | None]]:
    """All of them, by name: (parent, child, wants, how many parents, root)."""
    found = await scene.rows(
        "select p.name, c.name, d.wants, d.parents, r.name from dependencies d join jobs p on p.id = d.parent_id"
        " join jobs c on c.id = d.child_id left join jobs r on r.id = d.root_id"
    )
    return {tuple(row) for row in found}


async def joining(scene: Scene) -> set[str]:
    return {row["name"] for row in await scene.rows("select name from jobs where joins")}


def wrong(problem: Any) -> set[tuple[str, str]]:
    return {(each["path"], each["code"]) for each in problem["errors"]}


# ── made ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_child_is_started_by_its_parents_alone(scene: Scene) -> None:
    a = await scene.job(name="a", schedule=CRON)
    b = await child(scene, "a", {"job": a["id"], "on": "failure"}, expect=422, name="b")
    assert wrong(b) == {("depends_on[1]", "duplicate_dependency")}
    b = await child(scene, "a", name="b")
    assert b["depends_on"] == [{"job": "a", "on": "success"}], "written in full"
    assert b["schedule"]["description"] == "by hand only" and b["next_run_at"] is None
    c = await child(scene, {"job": b["id"], "on": "completion"}, name="c")
    assert c["depends_on"] == [{"job": b["id"], "on": "completion"}]
    assert await edges(scene) == {("a", "b", "s", 1, "a"), ("b", "c", "c", 1, "a")}
    assert await joining(scene) == {"a", "b"}
    feeds = (await scene.api.get(f"/v1/jobs/{a['id']}"))["feeds"]
    assert feeds == [{"job": b["id"], "name": "b", "on": "success"}] and c["feeds"] == a["feeds"] == []
    assert not await scene.rows("select from runs"), "nothing runs because it was made"


async def test_what_cannot_be_waited_for(scene: Scene) -> None:
    a = await scene.job(name="a")
    gone = await scene.job(name="gone")
    await scene.api.delete(f"/v1/jobs/{gone['id']}")
    await scene.api.post("/v1/tenants", {"slug": "else"})
    stranger = await scene.api.with_key("editor", "else")
    theirs = await scene.job(stranger, name="theirs")
    for parent in ("nobody", "gone", gone["id"], "theirs", theirs["id"], "x" * 128):
        problem = await child(scene, "a", parent, expect=422)
        assert problem["code"] == "unknown_job" and wrong(problem) == {("depends_on[1]", "unknown_job")}
    assert wrong(await child(scene, "b", expect=422, name="b")) == {("depends_on[0]", "self_dependency")}
    own = await child(scene, "a", schedule=CRON, expect=422)
    assert wrong(own) == {("schedule", "invalid")} and "leave its own schedule out" in own["detail"]
    assert (await child(scene, "a", schedule={"manual": True}))["schedule"]["manual"] is True
    assert await scene.value("select count(*) from jobs where name is null") == 1
    assert a["depends_on"] == []


async def test_a_key_sees_no_parents_that_it_may_not_see(scene: Scene) -> None:
    await scene.job(name="other.a")
    await scene.job(name="mine.a")
    made = await scene.api.post("/v1/keys", {"role": "editor", "scopes": {"jobs": ["mine.*"]}})
    from tests.conftest import Api

    mine = Api(scene.node, made["key"])
    body = {"name": "mine.b", "target": PROCESS, "depends_on": ["other.a"]}
    assert wrong(await mine.post("/v1/jobs", body, expect=422)) == {("depends_on[0]", "unknown_job")}
    b = await mine.post("/v1/jobs", body | {"depends_on": ["mine.a"]})
    refused = await mine.call("PATCH", f"/v1/jobs/{b['id']}", json={"depends_on": ["other.a"]}, expect=422)
    assert wrong(refused) == {("depends_on[0]", "unknown_job")}
    await mine.call("PATCH", f"/v1/jobs/{b['id']}", json={"depends_on": []})
    assert await edges(scene) == set() and await joining(scene) == set()


async def test_a_batch_may_depend_on_itself_and_is_all_or_nothing(scene: Scene) -> None:
    await scene.job(name="old", schedule=CRON)

    def job(name: str, *parents: Any, **more: Any) -> dict[str, Any]:
        return {"name": name, "target": PROCESS, "depends_on": list(parents)} | more

    batch = [job("d", "b", "c"), job("b", "old"), job("c", "old"), job("e", "c", "new"), job("new", schedule=CRON)]
    await scene.api.post("/v1/jobs/batch", {"jobs": batch})
    assert {("b", "d", "s", 2, "old"), ("c", "d", "s", 2, "old"), ("new", "e", "s", 2, None)} <= await edges(scene)
    assert await joining(scene) == {"old", "b", "c", "new"}
    ring = [job("x", "z"), job("y", "x"), job("z", "y")]
    problem = await scene.api.post("/v1/jobs/batch", {"jobs": ring}, expect=422)
    assert problem["code"] == "dependency_cycle" and "x → y → z → x" in problem["detail"]
    assert wrong(problem) == {("jobs[0].depends_on[0]", "dependency_cycle")}
    problem = await scene.api.post("/v1/jobs/batch", {"jobs": [job("x"), job("y", "x", "nobody")]}, expect=422)
    assert wrong(problem) == {("jobs[1].depends_on[1]", "unknown_job")}
    assert await scene.value("select count(*) from jobs") == 6


async def test_two_run_at_once_and_one_after_both_in_one_batch(scene: Scene) -> None:
    """Made at the same instant, they stand for the same one."""
    batch = [{"name": name, "target": PROCESS} for name in "ab"]
    batch.append({"name": "c", "target": PROCESS, "depends_on": ["a", "b"]})
    await scene.api.post("/v1/jobs/batch", {"jobs": batch})
    assert await scene.value("select count(distinct scheduled_for) from runs") == 1


async def test_an_idempotent_child_is_made_once(scene: Scene) -> None:
    await scene.job(name="a")
    body, headers = {"name": "b", "target": PROCESS, "depends_on": ["a"]}, {"idempotency-key": "k"}
    replies = await asyncio.gather(*(scene.api.http.post("/v1/jobs", json=body, headers=headers) for _ in range(4)))
    assert {r.status_code for r in replies} == {201} and len({r.json()["id"] for r in replies}) == 1
    again = await scene.api.post("/v1/jobs", body, expect=409)
    assert again["code"] == "name_taken"
    headers = {"idempotency-key": "l"}
    await scene.api.post("/v1/jobs", body | {"name": "c", "depends_on": ["nobody"]}, expect=422, headers=headers)
    await scene.api.post("/v1/jobs", body | {"name": "c"}, headers=headers)


# ── who comes together ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (CRON, CRON, True),
        (CRON, CRON | {"jitter": "1m", "misfire": {"policy": "skip"}}, True),
        (CRON, OTHER_CRON, False),
        (CRON, CRON | {"timezone": "Asia/Tokyo"}, False),
        ({"cron": "H 3 * * *"}, {"cron": "H 3 * * *"}, False),
        ({"every": "1h"}, {"every": "1h"}, False),
        ({"every": "1h", "starting_at": "2027-01-01T00:00:00Z"},) * 2 + (True,),
        ({"interval": "R/2027-01-01T00:00:00Z/PT1H"},) * 2 + (True,),
        ({"text": "every day at noon"}, {"text": "every day at noon"}, True),
        ({"manual": True}, {"manual": True}, False),
        (CRON, {"manual": True}, False),
    ],
)
async def test_parents_have_one_timetable_or_one_root(scene: Scene, one: Any, other: Any, together: bool) -> None:
    await scene.job(name="a", schedule=one)
    await scene.job(name="b", schedule=other)
    made = await child(scene, "a", "b", name="c", expect=201 if together else 422)
    if not together:
        assert wrong(made) == {("depends_on", "different_schedules")}
        assert "'a' and 'b' do not come together: give both the same schedule" in made["detail"]
    for name, parents in (("a1", "a"), ("a2", "a"), ("a3", "a1")):
        await child(scene, parents, name=name)
    await child(scene, "a1", "a2", "a3", "a", name="d")
    assert ("a3", "d", "s", 4, "a") in await edges(scene), "they all follow from one"


async def test_what_follows_from_a_meeting_follows_from_there(scene: Scene) -> None:
    await scene.job(name="a", schedule=CRON)
    await scene.job(name="b", schedule=CRON)
    await child(scene, "a", "b", name="c")
    await child(scene, "c", name="d")
    await child(scene, "c", "d", name="e")
    await child(scene, "e", "a", name="f")
    found = await edges(scene)
    assert {("c", "e", "s", 2, "c"), ("d", "e", "s", 2, "c"), ("a", "f", "s", 2, None)} <= found
    await scene.job(name="z", schedule=OTHER_CRON)
    problem = await child(scene, "f", "z", expect=422)
    assert "'f' and 'z' do not come together" in problem["detail"]


# ── changed ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_edit_gives_other_parents(scene: Scene) -> None:
    a, b = await scene.job(name="a"), await scene.job(name="b")
    c = await child(scene, "a", name="c")
    same = await patch(scene, c, depends_on=["a"])
    assert same["version"] == 1, "the short form is the same"
    changed = await patch(scene, c, depends_on=[{"job": "b", "on": "failure"}])
    assert changed["version"] == 2 and await edges(scene) == {("b", "c", "f", 1, "b")}
    assert await joining(scene) == {"b"}
    url = "/v1/jobs/by-name/c"
    await scene.api.call("PUT", url, json={"target": PROCESS, "depends_on": [a["id"]]})
    assert await edges(scene) == {("a", "c", "s", 1, "a")}
    await scene.api.call("PUT", "/v1/jobs/by-name/d", json={"target": PROCESS, "depends_on": ["c"]}, expect=201)
    free = await patch(scene, c, depends_on=[], schedule={"manual": None, "cron": "0 3 * * *"})
    assert free["next_run_at"] is not None and await edges(scene) == {("c", "d", "s", 1, "c")}
    bound = await patch(scene, c, depends_on=["b"], schedule=None)
    assert bound["next_run_at"] is None and bound["schedule"]["manual"] is True
    assert await edges(scene) == {("b", "c", "s", 1, "b"), ("c", "d", "s", 1, "b")}
    assert b["version"] == 1


async def test_a_cycle_is_named_however_long_and_changes_nothing(scene: Scene) -> None:
    a = await scene.job(name="a")
    for parent, name in ("ab", "bc", "cd"):
        await child(scene, parent, name=name)
    before = await edges(scene)
    problem = await patch(scene, a, 422, depends_on=["d"])
    assert problem["code"] == "dependency_cycle" and "a → b → c → d → a" in problem["detail"]
    assert wrong(problem) == {("depends_on[0]", "dependency_cycle")}
    assert wrong(await patch(scene, a, 422, depends_on=["a"])) == {("depends_on[0]", "self_dependency")}
    assert await edges(scene) == before


async def test_two_that_would_close_a_circle_together(scene: Scene) -> None:
    for _ in range(5):
        a, b = [await scene.job() for _ in "ab"]
        urls = [f"/v1/jobs/{job['id']}" for job in (a, b)]
        wishes = [{"depends_on": [b["id"]]}, {"depends_on": [a["id"]]}]
        replies = await asyncio.gather(
            *(scene.api.http.patch(url, json=wish) for url, wish in zip(urls, wishes, strict=True))
        )
        assert sorted(r.status_code for r in replies) == [200, 422]


async def test_a_schedule_that_others_wait_by_stays_theirs(scene: Scene) -> None:
    a = await scene.job(name="a", schedule=CRON)
    await scene.job(name="b", schedule=CRON)
    await child(scene, "a", "b", name="c")
    problem = await patch(scene, a, 422, schedule=OTHER_CRON)
    assert wrong(problem) == {("schedule", "different_schedules")} and "'c' waits for several jobs" in problem["detail"]
    assert (await patch(scene, a, description="x"))["version"] == 2
    alone = await scene.job(name="alone", schedule=CRON)
    await child(scene, "alone", name="d")
    await patch(scene, alone, schedule=OTHER_CRON)


async def test_a_parent_that_was_made_again_is_found_again(scene: Scene) -> None:
    first = await scene.job(name="a")
    c = await child(scene, "a", name="c")
    await scene.api.delete(f"/v1/jobs/{first['id']}")
    assert (await patch(scene, c, description="x"))["version"] == 2, "who it waits for stays"
    second = await scene.job(name="a")
    put = {"target": PROCESS, "depends_on": ["a"], "description": "x"}
    await scene.api.call("PUT", "/v1/jobs/by-name/c", json=put)
    parents = await scene.rows("select parent_id from dependencies")
    assert [str(row["parent_id"]) for row in parents] == [second["id"]]


async def test_an_ended_job_waits_for_nobody(scene: Scene) -> None:
    await scene.job(name="a")
    b = await child(scene, "a", name="b")
    await child(scene, "b", name="c")
    await scene.api.delete(f"/v1/jobs/{b['id']}")
    assert await edges(scene) == {("b", "c", "s", 1, "a")}


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_graphs_have_bounds(scene: Scene) -> None:
    await scene.job(name="root")
    problem = await child(scene, *(["root"] * (MOST_PARENTS + 1)), expect=422)
    assert wrong(problem) == {("depends_on", "too_many_parents")}
    chain = [
        {"name": f"n{i}", "target": PROCESS, "depends_on": [f"n{i - 1}" if i else "root"]} for i in range(DEEPEST - 1)
    ]
    await scene.api.post("/v1/jobs/batch", {"jobs": chain})
    problem = await child(scene, chain[-1]["name"], expect=422)
    assert wrong(problem) == {("depends_on", "too_deep")}
    wide = [{"name": f"w{i}", "target": PROCESS, "depends_on": ["root"]} for i in range(1000)]
    await scene.api.post("/v1/jobs/batch", {"jobs": wide})
    await child(scene, *(job["name"] for job in wide), name="in")
    assert await scene.value("select count(*) from dependencies where parents = 1000") == 1000
