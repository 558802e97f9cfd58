"""Every statement is short enough for asyncpg to keep it prepared."""

from __future__ import annotations

import importlib
import pkgutil

import tocsin.flow
from tocsin.store.db import Sql

LONGEST = 15_360  # asyncpg's `max_cacheable_statement_size`: a longer statement is parsed and planned at each call


def test_every_statement_can_be_kept_prepared() -> None:
    """Comments count: the loader keeps them in the text."""
    modules = [importlib.import_module(one.name) for one in pkgutil.walk_packages(tocsin.flow.__path__, "tocsin.flow.")]
    files = {module.__name__: module.SQL for module in modules if isinstance(getattr(module, "SQL", None), Sql)}
    found = {f"{file}:{name}": len(text) for file, sql in files.items() for name, text in sql.items()}
    assert len(found) > 400
    assert {name: length for name, length in found.items() if length > LONGEST} == {}
