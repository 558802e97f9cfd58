"""Programs that do not want to be stopped. Each writes the ids of its processes, one a line, to the file it is given.

python hostile.py hide FILE   forks twice, starts a session, ignores TERM, closes its files, empties its environment
python hostile.py hop FILE    the same, and lives on in a new process every few milliseconds, each an orphan
python hostile.py bomb FILE   forks and forks again, each in a session of its own (up to 200 at a time)
python hostile.py brand FILE  hides, and also takes off the limit by which it could be known
python hostile.py tick FILE   hides, and writes the time instead of its id, every few milliseconds
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

# What the programs need after they have emptied their environment.
PROGRAM = [sys.executable, "-I", "-S", os.path.abspath(__file__)]


def note(path: str) -> None:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


def vanish() -> None:
    """Become an orphan in a session of its own."""
    for _ in range(2):
        if os.fork():
            os._exit(0)
        os.setsid() if os.getpid() != os.getsid(0) else None


def settle(role: str, path: str) -> None:
    """Go on as a program that has nothing of its past but its arguments."""
    os.closerange(0, 256)
    os.execve(PROGRAM[0], [*PROGRAM, role, path], {})


def stay(path: str) -> None:
    note(path)
    while True:
        time.sleep(60)


def tick(path: str) -> None:
    with open(path, "a") as file:
        while True:
            file.write(f"{time.time()}\n")
            file.flush()
            time.sleep(0.005)


def hop(path: str) -> None:
    note(path)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.002)
        if os.fork():
            os._exit(0)
        os.setsid()
        note(path)


def bomb(path: str) -> None:
    note(path)
    for _ in range(3):
        with open(path) as file:
            if len(file.read().split()) > 200:
                break
        if os.fork() == 0:
            os.setsid()
            bomb(path)
    time.sleep(60)


def main() -> None:
    role, path = sys.argv[1:3]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    after = {"hide": stay, "hop": hop, "bomb": bomb, "brand": stay, "tick": tick}
    if len(sys.argv) == 3 and os.environ.get("PATH"):
        if os.fork():
            time.sleep(60)  # the run itself goes on
        if role == "brand":
            resource.setrlimit(resource.RLIMIT_RTTIME, (1000, resource.RLIM_INFINITY))
        vanish()
        settle(role, path)
    after[role](path)


main()
