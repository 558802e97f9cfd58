"""What a run is given beyond its row when it is handed to a worker: the secrets that its job names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tocsin.errors import ApiProblem
from tocsin.flow.secrets import SecretBook
from tocsin.flow.shared.specs import SpecKey, StoredSpec
from tocsin.store.db import Row


class Given(NamedTuple):
    """What one run is given."""

    secrets: dict[str, str]


class Handover(NamedTuple):
    """By run: what it is given, and why it cannot be handed over. Most runs stand in neither."""

    given: dict[str, Given]
    refused: dict[str, ApiProblem]


NOTHING_MORE = Given({})
_NOTHING = Handover({}, {})


class Courier:
    """Gathers it for all runs of a claim at once."""

    def __init__(self, secrets: SecretBook) -> None:
        self._secrets = secrets

    async def fetch(self, rows: Sequence[Row], specs: Mapping[SpecKey, StoredSpec]) -> Handover:
        """What these runs are given; for runs that want nothing it asks nobody."""
        naming = {key: stored.secrets for key, stored in specs.items() if stored.secrets}
        if not naming:
            return _NOTHING
        found = await self._secrets.read({(key[0], name) for key, named in naming.items() for name in named.values()})
        done = Handover({}, {})
        for row in rows:
            tenant_id = row["tenant_id"]
            named = naming.get((tenant_id, row["job_id"], row["job_version"]))
            if named is not None:
                _give(done, row["id"], {variable: found[tenant_id, name] for variable, name in named.items()})
        return done


def _give(done: Handover, run_id: str, found: Mapping[str, str | ApiProblem]) -> None:
    for value in found.values():
        if isinstance(value, ApiProblem):
            done.refused[run_id] = value
            return
    done.given[run_id] = Given({variable: value for variable, value in found.items() if isinstance(value, str)})
