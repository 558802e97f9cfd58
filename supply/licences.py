"""Under which terms packages come: as SPDX writes it, from what their metadata says in one way or another."""

from __future__ import annotations

import re
from email.message import Message
from importlib import metadata

ALLOWED = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "MIT",
        "MIT-0",
        "PSF-2.0",
        "PostgreSQL",
        "Unlicense",
    ),
    "MPL-2.0",  # binds changes to its own files alone
}
_KNOWN = {"colorama": "BSD-3-Clause"}  # for other systems than ours, so that its metadata cannot be read here
_WORDS = {
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


def licence_of(package: str) -> str:
    """An SPDX expression; empty if the package does not say."""
    if package in _KNOWN:
        return _KNOWN[package]
    try:
        about = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return ""
    return licence_in(about)  # type: ignore[arg-type]


def licence_in(about: Message) -> str:
    """The same from metadata. What says several things by classifiers may be used under any of them."""
    if expression := about.get("License-Expression"):
        return str(expression)
    said = _WORDS.get(about.get("License", "").strip(), about.get("License", "").strip())
    if said in ALLOWED:
        return said
    classifiers = [c.rpartition(" :: ")[2] for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
    return " OR ".join(sorted({_WORDS.get(c, c) for c in classifiers}))


def is_allowed(expression: str) -> bool:
    """Whether some choice of an expression has only terms that we take."""
    flat = re.sub(r"[()]", "", expression)
    return any(all(term.strip() in ALLOWED for term in choice.split(" AND ")) for choice in flat.split(" OR "))
