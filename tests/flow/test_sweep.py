"""The sweep looks at everything in bounded turns: what stays as it is never hides the rest."""

from __future__ import annotations

import uuid

from tests.flow.kit import Scene
from tocsin.node.reaper import Sweeper

W = "01900000-0000-7000-8000-000000000001"
# Keys of which one run runs and one waits. A key sorts by its number.
FULL_KEYS = """
    with k as (
        select ('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0'))::uuid as key
          from generate_series(1, $3::int) n
    ), limited as (
        insert into limits (tenant_id, key, max) select $1, key, 1 from k
    )
    insert into runs (tenant_id, id, job_id, job_version, lane_id, state, trigger, priority, scheduled_for, ready_at,
                      order_key, max_attempts, limited, key_id, worker_id, blocked_by, blocked_key)
    select j.tenant_id, gen_random_uuid(), j.id, 1, j.lane_id, s.state, 'api', 500, now(), now(), now(), 1, true, k.key,
           case s.state when 'running' then $4::uuid end, case s.state when 'waiting' then 'limit' end,
           case s.state when 'waiting' then k.key end
      from k
     cross join (values ('running'), ('waiting')) s(state)
     cross join (select * from jobs where tenant_id = $1 and id = $2) j
"""


def sweeper(scene: Scene, lanes: list[int]) -> Sweeper:
    return Sweeper(scene.db, lambda hints, stops: None, lambda: set(), lambda: set(lanes))


async def test_a_thousand_keys_that_stay_full_do_not_hide_the_one_with_room(scene: Scene) -> None:
    job = await scene.job(concurrency_key="{args.customer}")
    tenant_id = (await scene.who()).tenant_id
    await scene.employ(W)
    await scene.sql.execute(FULL_KEYS, tenant_id, job["id"], 2_500, W)
    last = uuid.UUID(f"00000000-0000-4000-8000-{2_500:012x}")
    await scene.sql.execute("delete from runs where state = 'running' and key_id = $1", last)
    sweeps = sweeper(scene, await scene.lanes())
    for turns in range(1, 4):
        await sweeps.run_once()
        ready = await scene.rows("select key_id from runs where state = 'ready'")
        assert [row["key_id"] for row in ready] == ([last] if turns == 3 else []), f"after {turns} turns"
    await sweeps.run_once()
    assert await scene.value("select count(*) from runs where state = 'ready'") == 1
