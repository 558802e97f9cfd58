"""Working folders: removed whatever is in them, and nothing beside them is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tocsin.worker import folders


def test_what_stands_beside_a_folder_keeps_its_mode(tmp_path: Path) -> None:
    """A folder that went while it was being removed once made /tmp the worker's own."""
    tmp_path.chmod(0o755)
    folders._remove(str(tmp_path / "gone"))
    locked = tmp_path / "run" / "a"
    (locked / "b").mkdir(parents=True)
    locked.chmod(0)
    folders._remove(str(tmp_path / "run"))
    assert os.listdir(tmp_path) == [] and stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
