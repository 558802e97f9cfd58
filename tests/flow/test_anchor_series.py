"""Anchors are signed, numbered, and name each other: an attacker with the database and the object storage, but without
the master key, cannot shorten a chain or its anchors unnoticed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.flow.kit import Scene
from tocsin.flow import seal, trail
from tocsin.flow.seal import Series
from tocsin.flow.trail import Mark
from tocsin.model.audit import Anchor, read_anchors, write_anchor
from tocsin.store.vault import MasterKeys

K1, K2 = b"1" * 32, b"2" * 32
KEYS = MasterKeys([K1])
FOLDER = "audit/1/"


async def write(scene: Scene, series: Series, *, writer: str = "one", keys: MasterKeys = KEYS) -> Anchor:
    """Write one more record, seal and anchor it. Return the anchor."""
    before = {a.mac for a in await anchors(scene)}
    await scene.job()
    await seal.seal(scene.db)
    assert await seal.anchor(scene.db, scene.node.objects, keys, writer, series, every=0.0) == 1
    [new] = [a for a in await anchors(scene) if a.mac not in before]
    return new


async def anchors(scene: Scene) -> list[Anchor]:
    found: list[Anchor] = []
    for key in await scene.node.objects.keys(FOLDER):
        found += read_anchors(await scene.node.objects.read(key) or b"")[0]
    return found


async def rewrite(scene: Scene, kept: list[Anchor]) -> None:
    """Keep only these anchors."""
    for key in await scene.node.objects.keys(FOLDER):
        await scene.node.objects.delete(key)
    text = b"".join(map(write_anchor, kept))
    await scene.node.objects.put(f"{FOLDER}{kept[0].at:%Y-%m-%d}.forged.ndjson", text)


async def findings(scene: Scene, series: Series | None = None, keys: MasterKeys = KEYS) -> list[str]:
    """Return the findings of a server; `series`: the anchors that it has written itself."""
    who, node = await scene.who(), scene.node
    written = (series or Series()).last
    proof = await trail.verify(scene.db, node.objects, node.parquet, keys, who, Mark(), 2555, written)
    return [f"{finding.kind}: {finding.what}" for finding in proof.findings]


async def put_back(scene: Scene, to: Anchor) -> None:
    """Cut the records, the chain and the sealer's notes back to an anchored record, and remove the later anchors."""
    before = sorted((a for a in await anchors(scene) if a.number <= to.number), key=lambda a: a.number)
    async with scene.sql.transaction():
        await scene.sql.execute(
            "delete from audit where id in (select audit_id from audit_chain where seq > $1)", to.seq
        )
        await scene.sql.execute("delete from audit_chain where seq > $1", to.seq)
        await scene.sql.execute(
            "update audit_heads set seq = $1, hash = $2, anchored_seq = $1, anchor_number = $3, anchor_line = $4",
            *(to.seq, bytes.fromhex(to.hash), to.number, seal.digest_of(to)),
        )
    await rewrite(scene, before)


async def test_a_chain_that_is_cut_back_to_an_anchor_is_found_by_the_server_that_wrote_later_ones(scene: Scene) -> None:
    series = Series()
    made = [await write(scene, series) for _ in range(4)]
    assert [a.number for a in made] == [1, 2, 3, 4]
    assert await findings(scene, series) == []
    await put_back(scene, made[1])
    [finding] = await findings(scene, series)
    assert finding.startswith("anchor: anchor 4 of the series")


async def test_a_running_server_continues_its_numbers_and_so_reveals_the_cut(scene: Scene) -> None:
    series = Series()
    made = [await write(scene, series) for _ in range(4)]
    await put_back(scene, made[1])
    assert (await write(scene, series)).number == 5
    assert await findings(scene) == ["anchor: anchor 3 to 4 of the series is missing"]
    later = Series()
    assert (await write(scene, later)).number == 6, "others go on from there"
    assert await findings(scene, later) == ["anchor: anchor 3 to 4 of the series is missing"]


async def test_a_series_that_ends_more_than_a_day_ago_was_cut_off(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then a server that does not know the later anchors has written another one, whether or not the chain moved."""
    series = Series()
    made = [await write(scene, series) for _ in range(3)]
    await put_back(scene, made[1])
    monkeypatch.setattr(trail, "LONGEST_SILENCE", timedelta(0))
    [finding] = await findings(scene)
    assert finding.startswith("anchor: the last is of")
    for key in await scene.node.objects.keys(FOLDER):
        await scene.node.objects.delete(key)
    await scene.sql.execute("update audit_heads set anchored_seq = 0")
    [finding] = await findings(scene)
    assert finding.startswith("anchor: there is none")


async def test_a_chain_that_does_not_move_is_anchored_every_day(scene: Scene) -> None:
    series = Series()
    await write(scene, series)

    async def turn() -> int:
        return await seal.anchor(scene.db, scene.node.objects, KEYS, "one", series, every=0.0)

    assert await turn() == 0
    await scene.sql.execute("update audit_heads set beat_at = beat_at - interval '20 hours'")
    assert await turn() == 1
    first, second = sorted(await anchors(scene), key=lambda a: a.number)
    assert (second.number, second.seq, second.hash) == (2, first.seq, first.hash)
    assert await turn() == 0
    assert await findings(scene, series) == []


async def test_removed_changed_and_replayed_anchors_are_found(scene: Scene) -> None:
    series = Series()
    made = [await write(scene, series) for _ in range(4)]
    for kept, what in (
        ([made[0], made[1], made[3]], "anchor 3 of the series is missing"),
        ([made[2], made[3]], "anchor 1 to 2 of the series is missing"),
        ([made[0], made[1], made[1], made[1], made[3]], "anchor 3 of the series is missing"),
    ):
        await rewrite(scene, kept)
        assert f"anchor: {what}" in await findings(scene)
    await rewrite(scene, [made[0], made[1], made[0], *made])
    assert await findings(scene) == [], "a copy of what is there says nothing new"


async def test_two_servers_make_one_series(scene: Scene) -> None:
    one, two = Series(), Series()
    for _ in range(3):
        await write(scene, one, writer="one")
        await write(scene, two, writer="two")
    await write(scene, two, writer="two")
    assert sorted(a.number for a in await anchors(scene)) == [1, 2, 3, 4, 5, 6, 7]
    assert len(await scene.node.objects.keys(FOLDER)) == 2
    assert await findings(scene, one) == await findings(scene, two) == []


async def test_an_anchor_that_is_made_again_after_a_crash_is_no_finding(scene: Scene) -> None:
    first = await write(scene, Series(), writer="dies")
    await scene.sql.execute("update audit_heads set anchored_seq = 0, anchor_number = 0, anchor_line = ''")
    again = await write(scene, Series(), writer="follows")
    assert first.number == again.number == 1
    series = Series()
    await write(scene, series)
    assert await findings(scene, series) == []


async def test_another_master_key_keeps_the_series_whole(scene: Scene) -> None:
    series, both, second = Series(), MasterKeys([K2, K1]), MasterKeys([K2])
    made = [await write(scene, series), await write(scene, series)]
    made += [await write(scene, series, keys=both), await write(scene, series, keys=second)]
    assert [a.key for a in made] == [KEYS.ids[0]] * 2 + [second.ids[0]] * 2
    assert await findings(scene, series, both) == await findings(scene, series, second) == []
    # The old key is gone, but an anchor that it signed cannot be changed: later anchors name it.
    forged = Anchor(tenant=1, seq=made[1].seq, hash=made[1].hash, at=made[0].at, number=2, key=made[1].key, mac="00")
    await rewrite(scene, [made[0], forged, *made[2:]])
    assert "anchor: anchor 3 does not follow anchor 2" in await findings(scene, keys=second)


async def test_an_anchor_without_a_signature_proves_nothing_where_servers_sign(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = Series()
    unsigned = MasterKeys([])
    await scene.job()
    await seal.seal(scene.db)
    await seal.anchor(scene.db, scene.node.objects, unsigned, "one", without, every=0.0)
    assert await findings(scene, without, unsigned) == []
    await write(scene, without)
    assert await findings(scene, without) == [], "before the cluster had a key"
    made = sorted(await anchors(scene), key=lambda a: a.number)
    forged = Anchor(
        tenant=1, seq=made[1].seq, hash=made[1].hash, at=made[1].at + timedelta(seconds=1), number=3,
        previous=seal.digest_of(made[1]),
    )  # fmt: skip
    await rewrite(scene, [*made, forged])
    [finding] = await findings(scene)
    assert "is not signed" in finding
    await rewrite(scene, [made[0]])
    await scene.sql.execute("update audit_heads set anchored_seq = 0")
    monkeypatch.setattr(trail, "LONGEST_SILENCE", timedelta(0))
    [finding] = await findings(scene)
    assert finding.startswith("anchor: there is none, and servers write a signed anchor")


async def test_a_restored_backup_continues_its_own_numbers(scene: Scene) -> None:
    series = Series()
    made = [await write(scene, series) for _ in range(3)]
    await scene.sql.execute(
        "delete from audit where id in (select audit_id from audit_chain where seq > $1)", made[0].seq
    )
    await scene.sql.execute("delete from audit_chain where seq > $1", made[0].seq)
    await scene.sql.execute(
        "update audit_heads set seq = $1, hash = $2, anchored_seq = $1, anchor_number = 1, anchor_line = $3",
        *(made[0].seq, bytes.fromhex(made[0].hash), seal.digest_of(made[0])),
    )
    await scene.sql.execute("update cluster set restored = 1")
    again = await write(scene, series)
    assert (again.number, again.epoch) == (2, 1)
    assert await findings(scene, series) == []


async def test_slow_storage_starves_no_tenant_of_anchors(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains that were tried longest ago come first, not those of the lowest tenant ids."""
    monkeypatch.setattr(seal, "ANCHORS_AT_ONCE", 2)
    for n in range(4):
        await scene.api.post("/v1/tenants", {"slug": f"busy-{n}"})
    ids = [row["id"] for row in await scene.rows("select id from tenants order by id")]
    series = Series()
    for _ in range(3):
        for id_ in ids:  # all chains move while storage accepts two at a time
            await scene.sql.execute(
                "insert into audit (tenant_id, actor, action, target) values ($1, 'a', 'b', 'c')", id_
            )
        await seal.seal(scene.db)
        assert await seal.anchor(scene.db, scene.node.objects, KEYS, "one", series, every=0.0) == 2
    assert await scene.value("select count(*) from audit_heads where anchored_seq = 0") == 0
