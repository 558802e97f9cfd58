"""How calls are put together: from parts of a path, a query and a body to a `Call`."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec

from tocsin.client.core import Call, Document, Page
from tocsin.clock import iso

Query = str | int | datetime | None

read_document = msgspec.json.Decoder(Document).decode
read_page = msgspec.json.Decoder(Page).decode


def read_anything(content: bytes) -> Document:
    """Documents, empty answers and plain words alike."""
    try:
        found = msgspec.json.decode(content) if content else {}
    except msgspec.DecodeError:
        return {"status": content.decode(errors="replace").strip()}
    return found if isinstance(found, dict) else {"items": found}


def path_of(*parts: str) -> str:
    """A path of these parts, each as it stands."""
    return "/" + "/".join(quote(part, safe="") for part in parts)


def text_of(value: Query) -> str:
    """A value as a query or body says it."""
    return iso(value) if isinstance(value, datetime) else str(value)


def query_of(**values: Query) -> dict[str, str]:
    """A query of what is given; a trailing underscore keeps a name clear of Python's own words."""
    return {name.rstrip("_"): text_of(value) for name, value in values.items() if value is not None}


def get(*parts: str) -> Call[Document]:
    """Read one thing."""
    return Call("GET", path_of(*parts), read_document)


def listing(*parts: str, **query: Query) -> Call[Page]:
    """Read a list, page by page."""
    return Call("GET", path_of(*parts), read_page, query=query_of(**query))


def post(*parts: str, body: Any = None, key: str | None = None, if_match: int | None = None) -> Call[Document]:
    """Do something; the answer may be anything."""
    return Call("POST", path_of(*parts), read_anything, body=body, idempotency_key=key, if_match=if_match)


def write(method: str, *parts: str, body: Any, key: str | None, if_match: int | None = None) -> Call[Document]:
    """Store something; the answer is its document."""
    return Call(method, path_of(*parts), read_document, body=body, idempotency_key=key, if_match=if_match)


def delete(*parts: str, if_match: int | None = None) -> Call[Document]:
    """Take something away."""
    return Call("DELETE", path_of(*parts), read_anything, if_match=if_match)
