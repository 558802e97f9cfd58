"""The same scene and database as the steps have."""

from __future__ import annotations

from tests.flow.conftest import database_url, scene, washed_database

__all__ = ["database_url", "scene", "washed_database"]
