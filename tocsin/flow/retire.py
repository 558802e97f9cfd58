"""retire: find lanes that no job and no run uses, retire them, and remove them later.

A pass reads all jobs and then all live runs, one page per turn, and marks the lanes that it meets. A lane that a whole
pass has not met is retired. From then on servers ask the database before they send a job through the lane, which takes
it back into use (`shared/lanes.py`). A lane is removed if another whole pass, begun at least ten minutes later, has not
met it either: no server can have used it since. This needs no index on jobs or runs, which every submission and claim
would pay for.
"""

from __future__ import annotations

from tocsin.store.db import Database, Sql

SQL = Sql(__file__)
_PAGES = {"jobs": SQL["page_of_jobs"], "runs": SQL["page_of_runs"]}
PAGE = 10_000  # rows that one turn reads
_REST = 600.0  # seconds between two passes
_HEARD = 600.0  # seconds after which every server knows that a lane is retired


async def turn(db: Database) -> bool:
    """Read one page. Return whether there was work. One server at a time does this; the others do nothing."""
    async with db.transaction("retire") as connection:
        at = await connection.fetchrow(SQL["lock"], _REST)
        if at is None:
            return False
        if at["part"] == "done":
            await connection.execute(SQL["begin"])
            return True
        page = await connection.fetchrow(_PAGES[at["part"]], at["at_tenant"], at["at_id"], PAGE)
        if page["lanes"]:
            await connection.fetch(SQL["mark"], page["lanes"], at["began_at"])
        if page["rows"] == PAGE:
            await connection.execute(SQL["go_on"], page["tenant_id"], page["id"])
        elif at["part"] == "jobs":
            await connection.execute(SQL["next_part"], "runs")
        else:
            await connection.fetch(SQL["remove"], at["began_at"], _HEARD)
            await connection.fetch(SQL["retire"], at["began_at"])
            await connection.execute(SQL["next_part"], "done")
    return True
