"""The same scene and database as the steps have, and one on a node whose loops turn."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.conftest import Api
from tests.flow.conftest import database_url, scene, washed_database
from tests.flow.kit import Scene

__all__ = ["database_url", "live", "scene", "washed_database"]


@pytest.fixture
async def live(api: Api, cluster: object, washed_database: str) -> AsyncIterator[Scene]:
    """The scene with every loop turning."""
    url = cluster.as_superuser(washed_database)  # type: ignore[attr-defined]
    connection = await asyncpg.connect(url, server_settings={"search_path": "tocsin", "timezone": "UTC"})
    yield Scene(api, connection)
    await connection.close()
