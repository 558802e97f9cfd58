"""A database that is washed between tests, where one of its own would only take longer, and a node's way to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.flow.conftest import database_url, washed_database
from tocsin.store.db import Database

__all__ = ["database_url", "db", "washed_database"]


@pytest.fixture
async def db(database_url: str) -> AsyncIterator[Database]:
    db = Database(database_url, size=2)
    await db.open()
    yield db
    await db.close()
