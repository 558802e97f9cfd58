"""Tables of Iceberg, as another engine finds and reads them that is told where one lies."""

from __future__ import annotations

from typing import Any

from pyiceberg.io import load_file_io
from pyiceberg.table import StaticTable

from tocsin.store import iceberg


def table(location: str, **properties: str) -> StaticTable:
    """The version in use; `properties` say how to get at a store."""
    with load_file_io(properties, location).new_input(f"{location}/{iceberg.HINT}").open() as hint:
        version = int(hint.read())
    return StaticTable.from_metadata(f"{location}/{iceberg.names(version)[-1]}", properties)


def read(location: str, properties: dict[str, str] | None = None, **asked: Any) -> list[dict[str, Any]]:
    """All rows, or those asked for, by run and attempt."""
    rows = table(location, **properties or {}).scan(**asked).to_arrow().to_pylist()
    return sorted(rows, key=lambda row: (row["run_id"], row["attempt"]))
