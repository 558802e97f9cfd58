"""Working folders: removed whatever is in them, and nothing beside them is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psutil
import pytest

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


def test_only_what_a_dead_worker_of_this_namespace_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers may share a /tmp: in each, the other's process ids mean nothing."""
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    here, dead = folders._namespace(), max(psutil.pids()) + 100_000
    mine = Path(folders._base())
    theirs, left = (tmp_path / f"tocsin-runs-{space}-{dead}-x" for space in (here + 1, here))
    for path in (theirs, left):
        (path / "a").mkdir(parents=True)
    folders._sweep()
    assert set(tmp_path.iterdir()) == {mine, theirs}


def test_workers_that_begin_together_may_sweep_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    dead = max(psutil.pids()) + 100_000
    left = [tmp_path / f"tocsin-runs-{folders._namespace()}-{dead}-{name}" for name in "ab"]
    for path in left:
        path.mkdir()
    looked = os.path.exists

    def another_was_faster(path: str) -> bool:
        for each in left:
            folders._remove(str(each))
        return looked(path)

    monkeypatch.setattr(folders.os.path, "exists", another_was_faster)
    folders._sweep()
    assert list(tmp_path.iterdir()) == []
