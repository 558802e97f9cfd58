"""Long rounds: `python -m tests.simulation --minutes 10 --seed 1` (`make simulate MINUTES=10`)."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import Cluster
from tests.simulation.rounds import open_world, play_round

SHARED_MEMORY = Path("/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(description="play seeded examples against the reference, until time is up")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1, help="the first; the next ones follow")
    parser.add_argument("--examples", type=int, default=100, help="of each seed")
    parser.add_argument("--shrink", action="store_true", help="look for a shorter example of what broke (minutes)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the database that was started is stopped
    seed = given.seed
    where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="tocsin-sim-", dir=where) as folder:
        home = Path(folder)
        home.chmod(0o711)
        cluster = Cluster(home)
        try:
            with open_world(cluster) as world:
                began = time.monotonic()
                while time.monotonic() - began < given.minutes * 60:
                    try:
                        play_round(seed, given.examples, given.shrink)
                    except BaseException:
                        print(
                            f"broken: --seed {seed} --examples {given.examples}",
                            file=sys.stderr,
                        )
                        raise
                    took = time.monotonic() - began
                    print(
                        f"seed {seed}: {world.examples} examples, {world.steps} steps ({world.crashes} crashed, "
                        f"{world.races} raced) in {took:.0f} s, {world.steps / took:.0f}/s",
                        flush=True,
                    )
                    seed += 1
        finally:
            cluster.server.stop(immediate=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
