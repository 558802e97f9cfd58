"""The scene of the steps, and a real server in a process of its own."""

from __future__ import annotations

from tests.flow.conftest import database_url, scene, washed_database

__all__ = ["database_url", "scene", "washed_database"]
