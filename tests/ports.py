"""Ports for servers that are started, stopped and started again."""

from __future__ import annotations

import random
import socket

_kept: list[socket.socket] = []


def free_port() -> int:
    """A port that is this process's own until it ends, also while no server listens there: outside the range from which
    the kernel gives ports to whoever names none, and kept from other tests by a name that only one process can have."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        name, probe = socket.socket(socket.AF_UNIX), socket.socket()
        try:
            name.bind(f"\0tocsin-test-port-{port}")
            probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        finally:
            probe.close()
        _kept.append(name)
        return port
