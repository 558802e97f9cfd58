"""Iceberg: the metadata (format version 2) by which other engines read files of Parquet as one table.

A version of a table is three objects: a manifest with all files, a list with that manifest, and the table's metadata
with one snapshot. There is nothing older in it: what is no longer in the table is not named by its metadata either.
Which version is in use stands in a hint, as tables without a catalogue have it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple
from uuid import NAMESPACE_URL, uuid5

import msgspec

from tocsin.store import avro

HINT = "metadata/version-hint.text"
# `day` is in no file: engines take it from the manifest, as the spec has it for what a table is partitioned by. Its
# number is beyond those of columns that may still come.
_DAY = {"id": 1000, "name": "day", "required": False, "type": "date"}
_DAY_FIELD = 1000
_EPOCH = date(1970, 1, 1)
_TYPES = {
    **{"INTEGER": "int", "BIGINT": "long", "BOOLEAN": "boolean"},
    **{"VARCHAR": "string", "UUID": "uuid", "TIMESTAMP": "timestamp"},
}


class DataFile(NamedTuple):
    """A file of Parquet: its address, and the day of all its rows."""

    address: str
    day: date
    rows: int
    size: int


class Table(NamedTuple):
    """Where it lies, and the columns of its files, numbered from 1 on: new ones come last, and none goes."""

    location: str
    columns: Mapping[str, str]

    def state(self, files: Sequence[DataFile]) -> str:
        """Names what a version says: two that say the same have the same."""
        return hashlib.sha256(msgspec.json.encode([self.location, self.columns, files])).hexdigest()


def names(version: int) -> tuple[str, str, str]:
    """The objects of a version, beside the files, in the order in which they are stored."""
    return f"metadata/{version}-manifest.avro", f"metadata/{version}-list.avro", f"metadata/v{version}.metadata.json"


def write(table: Table, files: Sequence[DataFile], version: int, now: datetime) -> list[bytes]:
    """What those objects hold."""
    manifest_name, list_name, _ = names(version)
    snapshot = int(table.state(files)[:15], 16)
    manifest = _manifest(table, files, version, snapshot)
    manifests = _list(f"{table.location}/{manifest_name}", len(manifest), files, version, snapshot)
    metadata = _metadata(table, files, version, snapshot, f"{table.location}/{list_name}", now)
    return [manifest, manifests, msgspec.json.format(msgspec.json.encode(metadata))]


def state_of(metadata: bytes) -> str | None:
    """The state that a stored version was written of; None if it is none of ours."""
    try:
        found = msgspec.json.decode(metadata, type=_Written)
    except msgspec.MsgspecError:
        return None
    return found.properties.get("tocsin.state")


class _Written(msgspec.Struct):
    properties: dict[str, str]


def _schema(table: Table) -> dict[str, Any]:
    columns = [
        {"id": number, "name": name, "required": False, "type": _TYPES[kind]}
        for number, (name, kind) in enumerate(table.columns.items(), 1)
    ]
    return {"type": "struct", "schema-id": len(columns), "fields": [*columns, _DAY]}


_PARTED = [{"source-id": _DAY["id"], "field-id": _DAY_FIELD, "name": "day", "transform": "identity"}]


def _metadata(
    table: Table, files: Sequence[DataFile], version: int, snapshot: int, manifests: str, now: datetime
) -> dict[str, Any]:
    schema = _schema(table)
    at = int(now.timestamp() * 1000)
    # For files that were written before their columns had numbers.
    mapped = [{"field-id": field["id"], "names": [field["name"]]} for field in schema["fields"]]
    summary = {
        "operation": "append",
        "total-data-files": str(len(files)),
        "total-records": str(sum(file.rows for file in files)),
        "total-files-size": str(sum(file.size for file in files)),
    }
    return {
        "format-version": 2,
        "table-uuid": str(uuid5(NAMESPACE_URL, table.location)),
        "location": table.location,
        "last-sequence-number": version,
        "last-updated-ms": at,
        "last-column-id": _DAY["id"],
        "current-schema-id": schema["schema-id"],
        "schemas": [schema],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": _PARTED}],
        "last-partition-id": _DAY_FIELD,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {
            "schema.name-mapping.default": msgspec.json.encode(mapped).decode(),
            "tocsin.state": table.state(files),
        },
        "current-snapshot-id": snapshot,
        "refs": {"main": {"snapshot-id": snapshot, "type": "branch"}},
        "snapshots": [
            {
                "snapshot-id": snapshot,
                "sequence-number": version,
                "timestamp-ms": at,
                "manifest-list": manifests,
                "summary": summary,
                "schema-id": schema["schema-id"],
            }
        ],
        "snapshot-log": [{"snapshot-id": snapshot, "timestamp-ms": at}],
        "metadata-log": [],
    }


def _record(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def _field(number: int, name: str, kind: Any) -> dict[str, Any]:
    more = {"default": None} if isinstance(kind, list) else {}
    return {"name": name, "type": kind, **more, "field-id": number}


_ENTRY = _record(
    "manifest_entry",
    _field(0, "status", "int"),
    _field(1, "snapshot_id", ["null", "long"]),
    _field(3, "sequence_number", ["null", "long"]),
    _field(4, "file_sequence_number", ["null", "long"]),
    _field(
        2,
        "data_file",
        _record(
            "r2",
            _field(134, "content", "int"),
            _field(100, "file_path", "string"),
            _field(101, "file_format", "string"),
            _field(
                102,
                "partition",
                _record("r102", _field(_DAY_FIELD, "day", ["null", {"type": "int", "logicalType": "date"}])),
            ),
            _field(103, "record_count", "long"),
            _field(104, "file_size_in_bytes", "long"),
        ),
    ),
)
_ADDED, _DATA = 1, 0  # the status of a file, and its kind


def _manifest(table: Table, files: Sequence[DataFile], version: int, snapshot: int) -> bytes:
    about = {
        "schema": msgspec.json.encode(_schema(table)).decode(),
        "schema-id": str(len(table.columns)),
        "partition-spec": msgspec.json.encode(_PARTED).decode(),
        "partition-spec-id": "0",
        "format-version": "2",
        "content": "data",
    }
    entries = [
        {
            "status": _ADDED,
            "snapshot_id": snapshot,
            "sequence_number": version,
            "file_sequence_number": version,
            "data_file": {
                "content": _DATA,
                "file_path": file.address,
                "file_format": "PARQUET",
                "partition": {"day": (file.day - _EPOCH).days},
                "record_count": file.rows,
                "file_size_in_bytes": file.size,
            },
        }
        for file in files
    ]
    return avro.write(_ENTRY, about, entries)


_MANIFEST = _record(
    "manifest_file",
    _field(500, "manifest_path", "string"),
    _field(501, "manifest_length", "long"),
    _field(502, "partition_spec_id", "int"),
    _field(517, "content", "int"),
    _field(515, "sequence_number", "long"),
    _field(516, "min_sequence_number", "long"),
    _field(503, "added_snapshot_id", "long"),
    _field(504, "added_files_count", "int"),
    _field(505, "existing_files_count", "int"),
    _field(506, "deleted_files_count", "int"),
    _field(512, "added_rows_count", "long"),
    _field(513, "existing_rows_count", "long"),
    _field(514, "deleted_rows_count", "long"),
)


def _list(address: str, length: int, files: Sequence[DataFile], version: int, snapshot: int) -> bytes:
    about = {
        "snapshot-id": str(snapshot),
        "parent-snapshot-id": "null",
        "sequence-number": str(version),
        "format-version": "2",
    }
    manifest = {
        "manifest_path": address,
        "manifest_length": length,
        "partition_spec_id": 0,
        "content": _DATA,
        "sequence_number": version,
        "min_sequence_number": version,
        "added_snapshot_id": snapshot,
        "added_files_count": len(files),
        "existing_files_count": 0,
        "deleted_files_count": 0,
        "added_rows_count": sum(file.rows for file in files),
        "existing_rows_count": 0,
        "deleted_rows_count": 0,
    }
    return avro.write(_MANIFEST, about, [manifest])
