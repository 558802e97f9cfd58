"""Workflows as files: read with the line of each value, stored, and written again."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tocsin.cli.output import Document
from tocsin.cli.shared import json_value
from tocsin.cli.text import plain
from tocsin.cli.yamlfile import BadYaml, Loaded, load
from tocsin.errors import TocsinError

if TYPE_CHECKING:
    from tocsin.client.sync import Client


class Refused(TocsinError):
    """What is wrong with a file, a line for each place."""


@dataclass(frozen=True)
class Written:
    """A workflow as it stands in a file."""

    file: str
    name: str
    document: Loaded

    def put(self, client: Client) -> Document:
        """Store it; raises `Refused`, with the lines that the server's words are about."""
        from tocsin.client.core import ApiError

        try:
            return client.put_workflow(self.name, self.document.value)
        except ApiError as error:
            if error.status != 422:
                raise
            wrong = error.errors or [{"path": "", "message": error.detail}]
            raise Refused("\n".join(self._at(**each) for each in wrong)) from None

    def _at(self, path: str, message: str, **_: Any) -> str:
        told = f"{path}: {message}" if path else message
        return plain(f"{self.file}:{self.document.line_of(path) or 1}: {told}")


def read(file: str) -> list[Written]:
    """The workflows of a file, or of standard input for `-`; raises `Refused`."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="FILE") from None
    documents = [each for each in _documents(file, text) if each.value is not None]
    if not documents:
        raise Refused(f"{file}: holds no workflow")
    return [_written(file, each) for each in documents]


def _documents(file: str, text: str) -> list[Loaded]:
    try:
        found = load(text)
    except BadYaml as error:
        if not file.endswith(".json"):
            raise Refused(plain(f"{file}:{error.line}: {error.message}")) from None
        found = [Loaded(None, {})]  # JSON may be indented with tabs
    if file.endswith(".json"):
        return [Loaded(json_value(text, file), found[0].lines)]
    return found


def _written(file: str, document: Loaded) -> Written:
    value = document.value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        line = document.line_of("name" if isinstance(value, dict) else "") or 1
        raise Refused(f"{file}:{line}: a workflow is an object with a name, and with jobs")
    return Written(file, value["name"], document)


def bare(workflow: Document) -> Document:
    """A workflow's document of the server's answer: what its owner said, without what is so by default."""
    from tocsin.model.job import Schedule
    from tocsin.model.workflow import WorkflowSpec
    from tocsin.wire import decode_workflow_spec

    document = {name: workflow[name] for name in WorkflowSpec.__struct_fields__}
    if document["schedule"] is not None:
        document["schedule"] = {n: v for n, v in document["schedule"].items() if n in Schedule.__struct_fields__}
    found: Document = _bare(decode_workflow_spec(json.dumps(document).encode()))
    jobs = found.pop("jobs")
    return found | {"jobs": jobs}  # the longest part last


def _bare(value: Any) -> Any:
    import msgspec

    from tocsin.model.scalars import encode_scalar

    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_bare(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value, enc_hook=encode_scalar)
    config, found = value.__struct_config__, {}
    if config.tag is not None:
        found[config.tag_field] = config.tag
    for each in msgspec.structs.fields(value):
        said = getattr(value, each.name)
        if said != (each.default_factory() if callable(each.default_factory) else each.default):
            found[each.encode_name] = _bare(said)
    return found
