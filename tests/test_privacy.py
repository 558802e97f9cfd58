"""What a process keeps to itself."""

from __future__ import annotations

import subprocess
import sys

_ASK = """
import ctypes
from tocsin.privacy import hide_memory
dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE
print(dumpable())
hide_memory()
print(dumpable())
"""


def test_a_process_can_hide_from_others_of_its_user() -> None:
    told = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True).stdout.split()
    assert told == ["1", "0"]
