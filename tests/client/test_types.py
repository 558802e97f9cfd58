"""The SDK's types are what a user's type checker needs: right code passes, wrong code is found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).with_name("typed_sample.py")
ROOT = Path(__file__).parents[2]


def test_a_type_checker_finds_what_is_wrong_and_nothing_else() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(SAMPLE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = {int(line) for line in re.findall(r"typed_sample\.py:(\d+): error", done.stdout)}
    wrong = {n for n, line in enumerate(SAMPLE.read_text().splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, done.stdout + done.stderr
