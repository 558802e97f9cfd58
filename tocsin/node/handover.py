"""What a run is given beyond its row when it is handed to a worker: the secrets that its job names, arguments that are
sealed or large, and what a sensitive job says itself. Gathered for all runs of a claim at once; for runs that want
nothing nobody is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tocsin.errors import ApiProblem
from tocsin.flow.payloads import Asked, Opened, Payloads
from tocsin.flow.secrets import SecretBook
from tocsin.flow.shared.sealing import DataKeys, open_target
from tocsin.flow.shared.specs import SpecKey, StoredSpec
from tocsin.model.packed import packed_in
from tocsin.store.db import Row
from tocsin.wire import ClaimedRun


@dataclass
class Given:
    """What one run is given."""

    secrets: dict[str, str] = field(default_factory=dict)
    opened: Opened | None = None
    stored: StoredSpec | None = None
    sensitive: bool = False


class Handover(NamedTuple):
    """By run: what it is given, and why it cannot be handed over. Most runs stand in neither."""

    given: dict[str, Given]
    refused: dict[str, ApiProblem]


class Courier:
    """Gathers it."""

    def __init__(self, secrets: SecretBook, payloads: Payloads, data_keys: DataKeys) -> None:
        self._secrets, self._payloads, self._data_keys = secrets, payloads, data_keys

    async def fetch(self, rows: Sequence[Row], specs: Mapping[SpecKey, StoredSpec], by_url: bool) -> Handover:
        """What these runs are given; `by_url`: their worker fetches large arguments by itself."""
        done = Handover({}, {})
        naming = {key: stored.secrets for key, stored in specs.items() if stored.secrets}
        if naming:
            await self._add_secrets(done, rows, naming)
        asked = {
            row["id"]: Asked(row["tenant_id"], row["job_id"], packed)
            for row in rows
            if row["args"] is not None and (packed := packed_in(row["args"])) is not None
        }
        if asked:
            await self._add_args(done, asked, by_url)
        if any(stored.sealed is not None for stored in specs.values()):
            await self._add_specs(done, rows, specs)
        return done

    async def _add_secrets(self, done: Handover, rows: Sequence[Row], naming: Mapping[SpecKey, dict[str, str]]) -> None:
        found = await self._secrets.read({(key[0], name) for key, named in naming.items() for name in named.values()})
        for row in rows:
            tenant_id = row["tenant_id"]
            named = naming.get((tenant_id, row["job_id"], row["job_version"]))
            if named is None:
                continue
            given = done.given.setdefault(row["id"], Given())
            for variable, name in named.items():
                value = found[tenant_id, name]
                if isinstance(value, ApiProblem):
                    done.refused[row["id"]] = value
                else:
                    given.secrets[variable] = value

    async def _add_args(self, done: Handover, asked: Mapping[str, Asked], by_url: bool) -> None:
        for run_id, opened in (await self._payloads.open(asked, by_url)).items():
            if isinstance(opened, ApiProblem):
                done.refused[run_id] = opened
                continue
            given = done.given.setdefault(run_id, Given())
            given.opened, given.sensitive = opened, given.sensitive or asked[run_id].packed.data_key > 0

    async def _add_specs(self, done: Handover, rows: Sequence[Row], specs: Mapping[SpecKey, StoredSpec]) -> None:
        """A sensitive job's document goes to each of its runs by itself: then every worker knows what to do with it."""
        opened: dict[SpecKey, StoredSpec | ApiProblem] = {}
        for key, stored in specs.items():
            if stored.sealed is not None:
                content = await open_target(self._data_keys, key[0], stored.sealed)
                opened[key] = content if isinstance(content, ApiProblem) else stored.saying(content)
        for row in rows:
            found = opened.get((row["tenant_id"], row["job_id"], row["job_version"]))
            if isinstance(found, ApiProblem):
                done.refused[row["id"]] = found
            elif found is not None:
                given = done.given.setdefault(row["id"], Given())
                given.stored, given.sensitive = found, True


def complete(runs: Sequence[ClaimedRun], given: Mapping[str, Given], packed: bool) -> None:
    """Give the runs what was gathered for them."""
    for run in runs:
        more = given.get(run.run_id)
        if more is None:
            continue
        run.secrets, run.sensitive = more.secrets, more.sensitive
        if more.opened is not None:
            run.args, run.args_url, run.args_sha256 = more.opened.args, more.opened.path, more.opened.sha256
        if more.stored is not None:
            run.spec, run.spec_ref = more.stored.msgpack if packed else more.stored.json, None
