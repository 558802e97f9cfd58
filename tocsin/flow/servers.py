"""servers: each says every few seconds that it lives and how new it is, so that a migration knows for whom to wait."""

from __future__ import annotations

import socket
import uuid
from typing import NamedTuple

from tocsin.store.db import Database, Sql
from tocsin.store.migrate import newest

SQL = Sql(__file__)


class Server(NamedTuple):
    """One server node, from its start to its end."""

    id: str
    name: str
    version: str
    newest_migration: str

    @classmethod
    def this(cls, port: int, version: str) -> Server:
        """This process."""
        return cls(str(uuid.uuid4()), f"{socket.gethostname()}:{port}", version, newest())


async def enlist(db: Database, server: Server) -> int:
    """It lives; those of whom nothing was heard for a day are forgotten. Answers a number that another past of the
    database, restored from a backup, does not share."""
    return await db.fetchval("engine", SQL["enlist"], *server)  # type: ignore[no-any-return]


async def leave(db: Database, server: Server) -> None:
    """It goes: nobody needs to wait for it."""
    await db.fetch("engine", SQL["leave"], server.id)
