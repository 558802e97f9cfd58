"""Results above 64 KB: they lie in object storage, whoever reads them gets them whole, and they go with their run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, time
from typing import Any

import pytest

from tests import s3 as server
from tests.conftest import Api
from tests.flow.kit import Scene, told
from tests.flow.old import DAY, Old
from tests.flow.stage import Stage, nodes
from tests.flow.test_payloads import KEY, age, objects, pass_by
from tests.flow.test_secrets import Hand, claimed, hand
from tocsin.errors import Unavailable
from tocsin.failpoints import NO_FAILPOINTS, Failpoints, InjectedFault
from tocsin.flow import report
from tocsin.flow import unfold as unfolding
from tocsin.flow.shared.parcels import Use, use
from tocsin.model.ids import new_id
from tocsin.model.packed import LARGE, MOST_RESULT
from tocsin.settings import Settings

__all__ = ["hand"]
BIG = {"rows": ["x" * 1000] * 100, "ü": "é"}
TEXT = json.dumps(BIG, separators=(",", ":"), ensure_ascii=False).encode()
SHOWN = {"$payload": {"size": len(TEXT), "sha256": hashlib.sha256(TEXT).hexdigest()}}
LIST = ["a" * 70_000, {"of": "b" * 1000}, 3]  # the first does not fit into a row either


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with server.serving() as endpoint:
        yield endpoint


@pytest.fixture
def settings(settings: Settings, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """With objects on S3 where a test says so."""
    settings = replace(settings, master_key=KEY)
    if getattr(request, "param", "folder") == "folder":
        return settings
    url = server.use(request.getfixturevalue("s3"), monkeypatch)
    return replace(settings, objects_url=f"{url}/{settings.home.name}")


on_both = pytest.mark.parametrize("settings", ["folder", "s3"], indirect=True)


async def ended(scene: Scene, hand: Hand, result: Any = BIG, **spec: Any) -> dict[str, Any]:
    """A run that has ended with this."""
    await scene.ask(await scene.job(**spec))
    [run] = await claimed(scene, hand)
    answer = await hand.report(finished=[told(run, result=result)])
    assert len(answer["accepted"]) == 1
    return run


async def by_node(stage: Stage, hand: Hand) -> dict[str, list[dict[str, Any]]]:
    """What became claimable in a workflow, by node."""
    await stage.turn()
    names = {r["id"]: r["node"] for r in await stage.scene.rows("select id::text, node from jobs where node <> ''")}
    found: dict[str, list[dict[str, Any]]] = {}
    for run in await claimed(stage.scene, hand):
        found.setdefault(names[run["job_id"]], []).append(run)
    return found


async def parents(scene: Scene, run: dict[str, Any]) -> Any:
    """What a run that has to fetch it is told of those that it waited for."""
    assert "parents" not in run
    return await Api(scene.node, run["token"]).get(run["parents_url"])


async def unfold(stage: Stage) -> None:
    while not await stage.scene.node.unfolder.run_once():
        pass


# ── kept, and read ───────────────────────────────────────────────────────────────────────────────────────────────


@on_both
async def test_whoever_reads_a_large_result_gets_it_whole(scene: Scene, hand: Hand) -> None:
    root = await scene.job(name="root")
    await scene.job(name="child", schedule=None, depends_on=["root"])
    await scene.ask(root)
    [run] = await claimed(scene, hand)
    await hand.report(finished=[told(run, result=BIG)])
    assert await scene.value("select max(length(result)) from history") < 300
    assert (await scene.run(run["run_id"]))["result"] == BIG
    [listed] = (await scene.api.get(f"/v1/jobs/{root['id']}/runs"))["items"]
    [attempt] = (await scene.api.get(f"/v1/runs/{run['run_id']}/attempts"))["items"]
    assert listed["result"] == attempt["result"] == SHOWN
    [child] = await claimed(scene, hand)
    assert (await parents(scene, child))["root"]["result"] == BIG


async def test_what_is_in_no_need_of_it_costs_no_query_and_stays_in_its_row(scene: Scene, hand: Hand) -> None:
    fits = "x" * (LARGE - 2)
    looks: list[str] = []
    fetch = scene.db.fetch

    async def listening(pool: str, sql: str, *args: Any) -> Any:
        looks.append(sql)
        return await fetch(pool, sql, *args)

    await scene.ask(await scene.job())
    [run] = await claimed(scene, hand)
    scene.db.fetch = listening
    await hand.report(finished=[told(run, result=fits)])
    scene.db.fetch = fetch
    assert len([sql for sql in looks if "insert into history" in sql]) == 1
    assert [sql for sql in looks if "payload" in sql or "unmapped" in sql or sql == report.SQL["whose"]] == []
    assert (await scene.run(run["run_id"]))["result"] == fits and list(objects(scene)) == []


async def test_what_looks_like_a_reference_is_told_as_it_is(scene: Scene, hand: Hand) -> None:
    run = await ended(scene, hand)
    kept = await scene.value("select result from history")
    assert kept[0] == " " and "$payload" in kept
    mine = json.loads(kept)
    assert (await scene.run((await ended(scene, hand, mine))["run_id"]))["result"] == mine
    assert (await scene.run((await ended(scene, hand, [kept, mine]))["run_id"]))["result"] == [kept, mine]
    assert (await scene.run(run["run_id"]))["result"] == BIG


async def test_a_result_that_is_told_with_the_runs_token(scene: Scene, hand: Hand) -> None:
    await scene.ask(await scene.job())
    [run] = await claimed(scene, hand)
    path = f"/v1/runs/{run['run_id']}/complete"
    holder = Api(scene.node, run["token"])
    assert (await holder.post(path, {"outcome": "succeeded", "result": "x" * MOST_RESULT}, expect=413))["code"]
    await holder.post(path, {"outcome": "succeeded", "result": BIG})
    await holder.post(path, {"outcome": "succeeded", "result": BIG})
    assert (await scene.run(run["run_id"]))["result"] == BIG
    assert await scene.value("select count(*) from payload_uses") == 1


async def test_many_large_and_small_results_in_one_report(scene: Scene, hand: Hand) -> None:
    await scene.ask(await scene.job(retry={"max_attempts": 1}), 5)
    runs = await claimed(scene, hand)
    results = [BIG, 1, BIG | {"n": 1}, None, "ü" * LARGE]
    ends = [told(run, "failed" if place == 2 else "succeeded", result=results[place]) for place, run in enumerate(runs)]
    odd = {"run_id": "no id", "attempt": 1, "fence": 7, "outcome": "succeeded", "result": BIG}
    stale = told(runs[0] | {"fence": runs[0]["fence"] + 1}, result="y" * LARGE)
    answer = await hand.report(finished=[*ends, odd, stale])
    assert len(answer["accepted"]) == 5 and len(answer["superseded"]) == 2
    assert [(await scene.run(run["run_id"]))["result"] for run in runs] == results
    assert len(list(objects(scene))) == 3, "of what was superseded nothing is stored"
    assert await scene.value("select count(*) from payload_uses where day is not null") == 3


# ── workflows ────────────────────────────────────────────────────────────────────────────────────────────────────


async def mapped(stage: Stage, hand: Hand, result: Any) -> str:
    """A workflow run whose list is known, but not fetched."""
    jobs = nodes({"list": [], "each": ["list"], "sum": ["each"]})
    jobs["each"]["map"] = {"over": "list"}
    jobs["each"]["concurrency_key"] = {"key": "of-{args.item}", "max": 9}
    await stage.make(jobs)
    run_id = await stage.ask()
    [run] = (await by_node(stage, hand))["list"]
    await hand.report(finished=[told(run, result=result)])
    return run_id


@on_both
async def test_a_node_is_mapped_over_a_large_list(stage: Stage, hand: Hand) -> None:
    run_id = await mapped(stage, hand, LIST)
    scene = stage.scene
    [each] = await scene.rows("select r.state, r.id::text from runs r join unmapped u on u.run_id = r.id")
    assert each["state"] == "waiting"
    told_by = await stage.api.get(f"/v1/runs/{each['id']}/explain")
    assert "fetched from object storage" in str(told_by["blockers"])
    await unfold(stage)
    runs = (await by_node(stage, hand))["each"]
    assert sorted(str(run["args"]) for run in runs) == sorted(map(str, [{"item": LIST[0]}, LIST[1], {"item": 3}]))
    assert await scene.value("select max(length(args)) from runs") < 2000
    assert await scene.value("select count(distinct key_id) from runs where origin_run_id is not null") == 3
    ends = [told(run, result=[run["args"], "z" * 60_000]) for run in runs]
    await hand.report(finished=ends)
    [last] = (await by_node(stage, hand))["sum"]
    whole = (await parents(scene, last))["each"]["result"]
    assert sorted(map(str, whole)) == sorted(str(end["result"]) for end in ends), "one of them lies elsewhere"
    await hand.report(finished=[told(last)])
    await stage.turn()
    run = await stage.get(run_id)
    sizes = {node["name"]: (node["result"], node["result_bytes"]) for node in run["nodes"]}
    assert run["state"] == "succeeded" and sizes["list"] == (None, len(json.dumps(LIST, separators=(",", ":"))))
    assert sizes["each"] == (None, len(json.dumps(whole, separators=(",", ":"))))
    assert await scene.value("select count(*) from unmapped") == 0


async def test_a_workflow_is_tried_again_from_the_failed_node(stage: Stage, hand: Hand) -> None:
    run_id = await mapped(stage, hand, LIST)
    await unfold(stage)
    runs = (await by_node(stage, hand))["each"]
    await hand.report(finished=[told(run, "succeeded" if run["args"] == LIST[1] else "failed") for run in runs])
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "dead"
    await stage.api.post(f"/v1/workflow-runs/{run_id}/retry")
    await stage.turn()
    await unfold(stage)
    again = (await by_node(stage, hand))["each"]
    assert sorted(str(run["args"]) for run in again) == sorted(str(run["args"]) for run in runs)
    assert (await parents(stage.scene, again[0]))["list"]["result"] == LIST
    await hand.report(finished=[told(run) for run in again])
    [last] = (await by_node(stage, hand))["sum"]
    await hand.report(finished=[told(last)])
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "succeeded"


async def test_a_node_that_waits_for_its_list_can_be_cancelled(stage: Stage, hand: Hand) -> None:
    run_id = await mapped(stage, hand, LIST)
    await stage.api.post(f"/v1/workflow-runs/{run_id}/cancel")
    await stage.turn()
    assert (await stage.get(run_id))["state"] == "cancelled"
    await unfold(stage)
    assert await stage.scene.value("select (select count(*) from runs) + (select count(*) from unmapped)") == 0


async def test_who_dies_while_a_node_is_unfolded_is_followed_by_the_next(
    stage: Stage, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mapped(stage, hand, LIST)
    scene = stage.scene

    async def down(key: str) -> bytes:
        raise Unavailable("it is down", code="objects_unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(scene.node.objects, "read", down)
        assert await scene.node.unfolder.run_once() > 0
    scene.db.failpoints = Failpoints("unfold.before_commit=raise")
    with pytest.raises(InjectedFault):
        await scene.node.unfolder.run_once()
    scene.db.failpoints = NO_FAILPOINTS
    await unfold(stage)
    assert len((await by_node(stage, hand))["each"]) == 3


async def test_nodes_whose_lists_cannot_be_fetched_keep_no_other_back(
    stage: Stage, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfolding, "_MOST", 1)
    await mapped(stage, hand, LIST)
    scene, read = stage.scene, stage.scene.node.objects.read
    [refused] = await scene.rows("select object from payloads")
    run_id = await stage.ask()
    [run] = (await by_node(stage, hand))["list"]
    await hand.report(finished=[told(run, result=[*LIST, 4])])

    async def refuse(key: str) -> bytes:
        if key == refused["object"]:
            raise Unavailable("access denied", code="objects_unavailable")
        return await read(key)

    monkeypatch.setattr(scene.node.objects, "read", refuse)
    for _ in range(4):
        await scene.node.unfolder.run_once()
    runs = (await by_node(stage, hand))["each"]
    assert len(runs) == 4 and {(await scene.run(r["run_id"]))["workflow_run_id"] for r in runs} == {run_id}


@pytest.mark.parametrize(("result", "says"), [(BIG, "list is no list"), ([0] * 40_000, "at most 1,000")])
async def test_what_cannot_be_mapped_over_says_why(stage: Stage, hand: Hand, result: Any, says: str) -> None:
    run_id = await mapped(stage, hand, result)
    await unfold(stage)
    await stage.turn()
    each = next(node for node in (await stage.get(run_id))["nodes"] if node["name"] == "each")
    assert (each["state"], each["reason"]) == ("dead", "map_failed") and says in each["error"]["message"]


async def test_a_lost_result_is_told_and_ends_the_map(stage: Stage, hand: Hand) -> None:
    run_id = await mapped(stage, hand, LIST)
    for path in (stage.scene.node.settings.home / "objects" / "payloads").rglob("*"):
        if path.is_file():
            path.unlink()
    await unfold(stage)
    await stage.turn()
    found = {node["name"]: node for node in (await stage.get(run_id))["nodes"]}
    assert found["each"]["reason"] == "map_failed" and "not in object storage" in found["each"]["error"]["message"]
    run = await stage.scene.run(found["list"]["run_id"])
    assert run["state"] == "succeeded" and run["result"]["$payload"]["error"] == "payload_gone"


# ── what goes wrong, and what goes ───────────────────────────────────────────────────────────────────────────────


async def cut_short(scene: Scene, hand: Hand) -> dict[str, Any]:
    """Create a run whose large result is in object storage and whose end was never written."""
    await scene.ask(await scene.job())
    [run] = await claimed(scene, hand)
    scene.db.failpoints = Failpoints("report.before_commit=raise")
    await hand.report(finished=[told(run, result=BIG)], expect=500)
    scene.db.failpoints = NO_FAILPOINTS
    return run


async def test_who_dies_before_the_commit_loses_nothing(scene: Scene, hand: Hand) -> None:
    run = await cut_short(scene, hand)
    assert (await scene.run(run["run_id"]))["state"] == "running" and len(list(objects(scene))) == 1
    assert await scene.value("select count(*) from payload_uses") == 0
    for _ in range(2):
        answer = await hand.report(finished=[told(run, result=BIG)])
        assert answer["accepted"] == [[run["run_id"], run["fence"]]]
    assert (await scene.run(run["run_id"]))["result"] == BIG
    assert len(list(objects(scene))) == 1 and await scene.value("select count(*) from payload_uses") == 1
    await age(scene)
    assert (await scene.run(run["run_id"]))["result"] == BIG


async def test_what_came_to_nothing_is_swept(scene: Scene, hand: Hand) -> None:
    run = await cut_short(scene, hand)
    await hand.report(finished=[told(run, result="another")])
    await age(scene)
    assert list(objects(scene)) == [] and await scene.value("select count(*) from payloads") == 0


async def test_without_object_storage_a_large_result_stays_in_its_row(
    scene: Scene, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(key: str, data: bytes, *, durable: bool = False) -> None:
        raise Unavailable("it is down", code="objects_unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(scene.node.objects, "put", down)
        run = await ended(scene, hand)
    assert (await scene.run(run["run_id"]))["result"] == BIG
    assert (await scene.api.get("/v1/runs"))["items"][0]["result"] == SHOWN, "lists stay small all the same"


async def test_while_an_older_server_lives_results_stay_whole(scene: Scene, hand: Hand) -> None:
    await scene.sql.execute(
        "insert into servers (id, name, version, newest_migration)"
        " values (gen_random_uuid(), 'old', '0', '0089_ended_joins')"
    )
    run = await ended(scene, hand)
    assert list(objects(scene)) == [] and (await scene.run(run["run_id"]))["result"] == BIG


async def test_a_run_that_results_in_its_arguments_needs_them_for_as_long_as_its_history(
    scene: Scene, hand: Hand
) -> None:
    await scene.ask(await scene.job(), args=BIG)
    [run] = await claimed(scene, hand)
    await hand.report(finished=[told(run, result=run["args"])])
    [use_] = await scene.rows("select user_id::text, day from payload_uses")
    assert use_["user_id"] == run["run_id"] and use_["day"] is not None
    assert len(list(objects(scene))) == 1


async def archived_with_large_arguments(
    old: Old, hand: Hand, *, by_an_older_server: bool
) -> tuple[str, dict[str, Any]]:
    """Create an old, archived run with large arguments in object storage. Return its id and its job."""
    scene = old.scene
    job = await scene.job()
    [asked] = await scene.ask(job, args=BIG)
    [run] = await claimed(scene, hand)
    await hand.report(finished=[told(run)])
    await old.make_day(DAY)
    run_id = new_id(datetime.combine(DAY, time(1), UTC))
    await scene.sql.execute("update history set run_id = $1 where run_id = $2", run_id, asked)
    await scene.sql.execute(
        "update payload_uses set user_id = $1, day = $3 where user_id = $2",
        *(run_id, asked, None if by_an_older_server else DAY),
    )
    await pass_by(scene, 1.01)
    assert await old.archive() == [DAY] and await old.hot() == 0
    return run_id, job


@on_both
@pytest.mark.parametrize("by_an_older_server", [False, True])
async def test_arguments_stay_as_long_as_their_run_is_in_the_archive(
    old: Old, hand: Hand, by_an_older_server: bool
) -> None:
    scene = old.scene
    run_id, _ = await archived_with_large_arguments(old, hand, by_an_older_server=by_an_older_server)
    await age(scene)
    assert len(await scene.node.objects.keys("payloads/")) == 1
    again = await scene.api.post(f"/v1/runs/{run_id}/retry")
    [run] = await claimed(scene, hand)
    assert (run["run_id"], run["args"]) == (again["id"], BIG)
    await hand.report(finished=[told(run)])
    await scene.sql.execute("delete from history")
    await age(scene)
    assert len(await scene.node.objects.keys("payloads/")) == 1, "the archive still names it"
    await scene.sql.execute("update archives set expired_at = now()")
    await age(scene)
    assert await scene.node.objects.keys("payloads/") == []


async def test_the_day_of_a_run_is_noted_with_its_arguments(scene: Scene) -> None:
    [run_id] = await scene.ask(await scene.job(), args=BIG)
    assert await scene.value("select day from payload_uses where user_id = $1", run_id) == (await scene.now()).date()


@on_both
async def test_a_result_stays_as_long_as_its_run_is_in_the_archive(old: Old) -> None:
    scene = old.scene
    await old.make_day(DAY)
    [run_id] = await old.rows(await old.job(), DAY, 1, state="succeeded")
    tenant_id = await scene.value("select tenant_id from history")
    parcel = await scene.node.parcels.put(tenant_id, TEXT)
    async with scene.db.transaction("test") as connection:
        await use(connection, [Use(tenant_id, parcel.place(tenant_id), run_id, DAY)])
    await scene.sql.execute("update history set result = $1 where run_id = $2", parcel.reference, run_id)
    assert await old.archive() == [DAY] and await old.hot() == 0
    await age(scene)
    assert (await scene.run(run_id))["result"] == BIG
    [listed] = (await scene.api.get("/v1/runs"))["items"]
    assert listed["result"] == SHOWN
    await scene.sql.execute("update archives set expired_at = now()")
    await age(scene)
    assert await scene.node.objects.keys("payloads/") == []
