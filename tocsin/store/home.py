"""The home folder of `tocsin up`: who may be in it, and that only one program is.

Nothing outside the home is ever changed. A home that cannot work is refused with the reason and the way out.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from tocsin.errors import SetupError

# One of these makes a folder that is not empty ours; without them it is somebody's, and its mode is not ours to change.
_OURS = {"lock", "data", "secrets", "objects", "credentials.toml"}
_ELSEWHERE = "Set TOCSIN_HOME to another folder."


@dataclass(frozen=True)
class Account:
    """The user PostgreSQL runs as when we are root, because it refuses root."""

    name: str
    uid: int
    gid: int


def database_account() -> Account | None:
    """`nobody` for root, None (ourselves) for everyone else."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise SetupError(
            "PostgreSQL does not run as root, and there is no user `nobody` to run it as. "
            "Start Tocsin as an ordinary user, or give it a PostgreSQL with DATABASE_URL."
        ) from None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def prepare_home(home: Path, account: Account | None = None) -> Path:
    """Create the home if need be and make sure that we, and `account`, can work in it; answers its real path."""
    if any(ord(character) < 32 or ord(character) == 127 for character in str(home)):
        raise SetupError(f"the home {str(home)!r} has a control character in its path. {_ELSEWHERE}")
    try:
        home = home.expanduser().resolve()
        if account is not None:
            _require_a_way_in(home, account)
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = home.stat()
        names = set(os.listdir(home)) if found.st_uid == os.geteuid() else set()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SetupError(f"the home {home} cannot be used: {reason}. {_ELSEWHERE}") from None
    if found.st_uid != os.geteuid():
        raise SetupError(
            f"the home {home} belongs to {_user_name(found.st_uid)}, not to {_user_name(os.geteuid())} who starts "
            f"Tocsin. Start it as {_user_name(found.st_uid)}, or set TOCSIN_HOME to another folder."
        )
    if names and not names & _OURS:
        raise SetupError(f"{home} has files in it that are not Tocsin's. Set TOCSIN_HOME to a new or empty folder.")
    if account is not None:
        _require_a_way_in(home, account)  # again, for a strict umask may have closed the parents that were just made
    _set_mode(home, 0o700 if account is None else 0o711)
    return home


def private_folder(path: Path, account: Account | None = None) -> Path:
    """A folder that only its owner (us, or `account`) can enter."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if account is not None and path.stat().st_uid != account.uid:
            os.chown(path, account.uid, account.gid)
    except OSError as error:
        raise SetupError(f"{path} cannot be used: {error.strerror}. {_ELSEWHERE}") from None
    _set_mode(path, 0o700)
    return path


def write_private(path: Path, text: str) -> None:
    """Replace a file that only we can read, all at once."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make what was created or renamed in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class HomeLock:
    """Only one `tocsin up` per home. The kernel lets go of the lock when its holder dies, however it dies."""

    def __init__(self, home: Path) -> None:
        self._path = home / "lock"
        self._file: int | None = None
        self.left_behind = False

    @property
    def held(self) -> bool:
        """Whether this object has the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Take the lock (nothing happens if held); `left_behind` then says whether the last holder was killed."""
        if self.held:
            return
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise SetupError(f"{self._path} cannot be written: {error.strerror}. {_ELSEWHERE}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise SetupError(
                f"Tocsin is already running (pid {holder}) on {self._path.parent}. Stop it first, or set TOCSIN_HOME "
                "(and TOCSIN_PORT) for a second one."
            ) from None
        self.left_behind = bool(os.pread(file, 1, 0))
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file

    def release(self) -> None:
        """Give the lock back and leave it empty: the mark of an orderly end."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None


def _require_a_way_in(home: Path, account: Account) -> None:
    for folder in filter(Path.exists, reversed(home.parents)):
        found = folder.stat()
        if found.st_uid == account.uid:
            needed = stat.S_IXUSR
        else:
            needed = stat.S_IXGRP if found.st_gid == account.gid else stat.S_IXOTH
        if not found.st_mode & needed:
            raise SetupError(
                f"PostgreSQL does not run as root but as user `{account.name}`, who cannot pass through {folder} "
                f"(mode {stat.S_IMODE(found.st_mode):04o}) to the home {home}. Set TOCSIN_HOME to a folder whose "
                "parents everyone may pass, such as /var/lib/tocsin, or start Tocsin as an ordinary user."
            )


def _set_mode(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) != mode:
        try:
            path.chmod(mode)
        except OSError as error:
            raise SetupError(f"the mode of {path} cannot be set: {error.strerror}. {_ELSEWHERE}") from None


def _user_name(uid: int) -> str:
    try:
        return f"user `{pwd.getpwuid(uid).pw_name}`"
    except KeyError:
        return f"user {uid}"
