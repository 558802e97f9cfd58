"""What a run is given beyond its row when it is handed to a worker: the secrets that its job names, arguments that are
sealed or large, and what a job itself says that is; the state that the attempt before has left. Gathered for all runs
of a claim at once; for runs that want nothing nobody is asked."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tocsin.errors import ApiProblem, Unavailable
from tocsin.flow.note import Notebook
from tocsin.flow.payloads import Asked, Opened, Payloads
from tocsin.flow.secrets import SecretBook
from tocsin.flow.shared.contents import Contents
from tocsin.flow.shared.specs import SpecKey, StoredSpec
from tocsin.model.masks import Mask, confidential
from tocsin.model.packed import packed_in
from tocsin.node.reads import Read, Reads
from tocsin.store.db import Row
from tocsin.wire import ClaimedRun, Fetch, encode_msgpack


@dataclass
class Given:
    """What one run is given."""

    secrets: dict[str, str] = field(default_factory=dict)
    opened: Opened | None = None
    sensitive: bool = False
    checkpoint: Any = None


class Handover(NamedTuple):
    """Everything that claimed runs are handed over with. By run: what the run is given, and why it cannot be handed
    over; most runs appear in neither. By job: its document with the whole content of its target, and the parts that the
    worker must fetch; most jobs appear in neither. `late`: runs with a read that has not finished."""

    given: dict[str, Given]
    refused: dict[str, ApiProblem]
    specs: dict[SpecKey, StoredSpec]
    contents: dict[SpecKey, dict[str, Fetch]]
    late: set[str]


class Courier:
    """Collects secrets, payloads and checkpoints for claimed runs."""

    def __init__(self, secrets: SecretBook, payloads: Payloads, contents: Contents, notes: Notebook) -> None:
        self._secrets, self._payloads, self._contents, self._notes = secrets, payloads, contents, notes
        self._reads = Reads()

    async def fetch(
        self,
        rows: Sequence[Row],
        specs: Mapping[SpecKey, StoredSpec],
        by_url: bool,
        contents_by_url: bool = False,
        patience: float | None = None,
    ) -> Handover:
        """Return what these runs are given. `by_url`: the worker fetches large arguments itself; otherwise the content
        of the jobs is included, too. `patience`: how many seconds to wait for object storage; None waits until it
        answers."""
        done = Handover({}, {}, {}, {}, set())
        naming = {key: stored.secrets for key, stored in specs.items() if stored.secrets}
        if naming:
            await self._add_secrets(done, rows, naming)
        asked = {
            row["id"]: Asked(row["tenant_id"], row["job_id"], packed)
            for row in rows
            if row["args"] is not None and (packed := packed_in(row["args"])) is not None
        }
        apart = {key: stored for key, stored in specs.items() if not stored.is_whole}
        if asked or apart:
            await asyncio.gather(
                self._add_args(done, asked, by_url, patience),
                self._add_contents(done, rows, apart, contents_by_url, patience),
            )
        for row in rows:
            if row["checkpoint"] is not None:
                state = await self._notes.opened(row)
                if isinstance(state, ApiProblem):
                    done.refused[row["id"]] = state
                else:
                    done.given.setdefault(row["id"], Given()).checkpoint = state
        return done

    async def mask(self, row: Row, stored: StoredSpec) -> Mask | None:
        """What blots out all that this run was told in confidence, if it was told anything."""
        if not stored.confides(row["args"]):
            return None
        key = row["tenant_id"], row["job_id"], row["job_version"]
        done = await self.fetch([row], {key: stored}, by_url=False)
        problem = done.refused.get(row["id"])
        if isinstance(problem, Unavailable):  # another server, or this one later, knows what must not be told
            raise problem
        given, target = done.given.get(row["id"], Given()), done.specs.get(key, stored).spec.target
        if given.opened is not None:
            args = given.opened.args
        else:
            args = None if row["args"] is None else msgspec.json.decode(row["args"])
        return Mask(confidential(given.secrets, args, target, given.sensitive))

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

    async def _add_args(self, done: Handover, asked: Mapping[str, Asked], by_url: bool, patience: float | None) -> None:
        openers = await self._payloads.openers(asked, by_url) if asked else {}
        wanted = {
            (run_id, by_url): Read(opener, asked[run_id].packed.size if asked[run_id].packed.place else 0)
            for run_id, opener in openers.items()
        }
        found = await self._reads.within(wanted, patience)
        for run_id in openers:
            if (run_id, by_url) not in found:
                done.late.add(run_id)
                continue
            opened = found[run_id, by_url]
            if isinstance(opened, ApiProblem):
                done.refused[run_id] = opened
                continue
            given = done.given.setdefault(run_id, Given())
            given.opened, given.sensitive = opened, given.sensitive or asked[run_id].packed.data_key > 0

    async def _add_contents(
        self,
        done: Handover,
        rows: Sequence[Row],
        apart: Mapping[SpecKey, StoredSpec],
        by_url: bool,
        patience: float | None,
    ) -> None:
        unreadable: dict[SpecKey, ApiProblem] = {}
        wanted: dict[SpecKey, Read] = {}
        for key, stored in apart.items():
            if by_url and not stored.is_sealed and self._payloads.gives_urls:
                done.contents[key] = {
                    name: Fetch(url=self._payloads.path(parcel.place(key[0]), parcel.size), sha256=parcel.sha256)
                    for name, parcel in stored.parcels.items()
                }
                continue
            size = sum(parcel.size for parcel in stored.parcels.values())
            wanted[key] = Read(functools.partial(self._contents.content, key[0], stored.spec), size)
        found = await self._reads.within(wanted, patience)
        for key, content in found.items():
            if isinstance(content, ApiProblem):
                unreadable[key] = content
            else:
                done.specs[key] = apart[key].saying(content)
        for row in rows:
            key = row["tenant_id"], row["job_id"], row["job_version"]
            if key in wanted and key not in found:
                done.late.add(row["id"])
            elif key in unreadable:
                done.refused[row["id"]] = unreadable[key]
            elif key in apart and apart[key].is_sealed:
                done.given.setdefault(row["id"], Given()).sensitive = True


def complete(runs: Sequence[ClaimedRun], given: Mapping[str, Given]) -> None:
    """Give the runs what was gathered for them."""
    for run in runs:
        more = given.get(run.run_id)
        if more is None:
            continue
        run.secrets, run.sensitive, run.checkpoint = more.secrets, more.sensitive, more.checkpoint
        if more.opened is not None:
            run.args, run.args_url, run.args_sha256 = more.opened.args, more.opened.path, more.opened.sha256


def can_be_told(run: ClaimedRun) -> bool:
    """Whether a worker can be sent it: not if it has integers that msgpack does not."""
    try:
        return bool(encode_msgpack(run))
    except OverflowError:
        return False
