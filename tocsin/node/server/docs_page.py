"""`/docs`: the OpenAPI document as one page of HTML, written here: no script, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html import escape
from typing import Any

import msgspec

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  --line: color-mix(in srgb, gray 35%, transparent) }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 13px/1.45 ui-monospace, monospace }
pre { overflow-x: auto; padding: .6rem .8rem; border: 1px solid var(--line); border-radius: 6px }
details { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; padding: .4rem .8rem }
summary { cursor: pointer }
summary b { display: inline-block; width: 4.5rem; font: 600 12px ui-monospace, monospace }
summary span { opacity: .7; margin-left: .8rem }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid var(--line); padding: .25rem .8rem .25rem 0; vertical-align: top }
"""
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def render(document: dict[str, Any]) -> bytes:
    """The page."""
    return "".join(_page(document)).encode()


def _page(document: dict[str, Any]) -> Iterator[str]:
    info = document["info"]
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])} API</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{_STYLE}</style><h1>{escape(info['title'])} API {escape(info['version'])}</h1>"
    yield f'<p>{escape(info["summary"])} As data: <a href="/openapi.json">openapi.json</a>. Each call needs '
    yield "<code>Authorization: Bearer &lt;key&gt;</code>; errors are <code>application/problem+json</code>.</p>"
    group = ""
    for path, operations in sorted(document["paths"].items()):
        for method, operation in operations.items():
            if operation["tags"][0] != group:
                group = operation["tags"][0]
                yield f"<h2>{escape(group)}</h2>"
            yield from _operation(method, path, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        yield f"<span>{escape(schema.get('description', ''))}</span></summary>"
        yield f"<table>{''.join(_fields(schema))}</table></details>"


def _operation(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f'<details id="{escape(operation["operationId"])}">'
    yield f"<summary><b>{method.upper()}</b><code>{escape(path)}</code>"
    yield f"<span>{escape(operation['summary'])}</span></summary><p>{escape(operation['description'])}</p>"
    if operation["parameters"]:
        rows = (
            _row(p["name"], f"{p['in']}: {_kind(p['schema'])}", p.get("description", ""))
            for p in operation["parameters"]
        )
        yield f"<table>{''.join(rows)}</table>"
    if "requestBody" in operation:
        body = operation["requestBody"]["content"]["application/json"]
        example = msgspec.json.format(msgspec.json.encode(body["example"]), indent=2).decode()
        yield f"<p>Body: {_kind(body['schema'])}, such as</p><pre>{escape(example)}</pre>"
    yield "<p>Answers: "
    answers = []
    for status, reply in operation["responses"].items():
        content = reply.get("content", {}).get("application/json")
        answers.append(f"<code>{status}</code>" + (f" {_kind(content['schema'])}" if content else ""))
    yield ", ".join(answers) + "</p></details>"


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if isinstance(field, dict) and "default" in field:
            note = f"default <code>{escape(msgspec.json.encode(field['default']).decode())}</code>"
        else:
            note = "always there" if name in required else ""
        yield _row(name, _kind(field), note, raw=True)


def _row(name: str, kind: str, note: str, raw: bool = False) -> str:
    return f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{note if raw else escape(note)}</tr>"


def _kind(schema: Any) -> str:
    """A schema in a few words, with links to those it names."""
    if not isinstance(schema, dict):
        return "any"
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " | ".join(map(_kind, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("format") or schema.get("type", "any")))
    if "items" in schema:
        kind += f" of {_kind(schema['items'])}"
    bounds = [f"{escape(word)} {schema[key]}" for key, word in _BOUNDS.items() if key in schema]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


_BOUNDS = {
    "minimum": "≥",
    "maximum": "≤",
    "minLength": "length ≥",
    "maxLength": "length ≤",
    "minItems": "items ≥",
    "maxItems": "items ≤",
}
