"""What must become of every node of a workflow run: slow, obvious, and without a line of the code it judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

End = tuple[str, str | None]
Edge = tuple[str, str]  # (parent, on)


def ends(
    parents: Mapping[str, Sequence[Edge]], own: Mapping[str, str], known: Mapping[str, End] | None = None
) -> dict[str, End]:
    """The final (state, reason) of each node. `own`: how a node ends by itself if it comes to run: `succeeded`, `dead`,
    `cancelled` or `expired`. A reason is told of skipped nodes only. `known`: those that have ended, and stay so."""
    found: dict[str, End] = dict(known or {})
    while len(found) < len(parents):
        for node, edges in parents.items():
            if node not in found and all(parent in found for parent, _ in edges):
                found[node] = _end_of(own[node], [(on, *found[parent]) for parent, on in edges])
    return found


def again(parents: Mapping[str, Sequence[Edge]], known: Mapping[str, End], *nodes: str) -> set[str]:
    """What is run again with some nodes, of those that have ended so: whatever follows from them, on success, failure
    or completion, and never ran. It was skipped by how they ended, or by how what follows from them did: now they end
    anew, and nobody knows yet how."""
    never_ran = {node for node, (state, reason) in known.items() if reason in ("upstream_failed", "not_needed")}
    found = set(nodes)
    for _ in parents:  # no way is longer than that
        found |= {child for child in never_ran if any(parent in found for parent, _ in parents[child])}
    return found


def _end_of(own: str, edges: Sequence[tuple[str, str, str | None]]) -> End:
    bad_end = ("dead", "cancelled", "expired")
    if any(
        on == "success" and (state in bad_end or (state, reason) == ("skipped", "upstream_failed"))
        for on, state, reason in edges
    ):
        return "skipped", "upstream_failed"
    if any(on == "success" and (state, reason) == ("skipped", "not_needed") for on, state, reason in edges):
        return "skipped", "not_needed"
    if any(on == "failure" and state != "dead" for on, state, _ in edges):
        return "skipped", "not_needed"
    return own, None


def outcome(found: Mapping[str, End], cancelled: bool = False) -> str:
    """The final state of the whole run."""
    well = [end for end in found.values() if end in (("succeeded", None), ("skipped", "not_needed"))]
    if len(well) == len(found):
        return "succeeded"
    return "cancelled" if cancelled else "dead"
