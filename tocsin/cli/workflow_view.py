"""What there is to see of a workflow and of a run of it: the graph with its states, or a summary where that is too
large; how it went on; what failed and what took longest."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tocsin.cli.drawing import ASCII, UNICODE, Job, draw
from tocsin.cli.job import last_run, schedule_words
from tocsin.cli.output import Document, Fields, Line, Span, colour, now, print_document, print_lines
from tocsin.cli.text import instant, length, local, milliseconds, pairs, when, why

# A mark for each state: what the eye finds without colour, and what a terminal without Unicode has.
MARKS = {
    "succeeded": ("✓", "+"),
    "running": ("●", "*"),
    "stopping": ("◐", "%"),
    "ready": ("○", "o"),
    "staged": ("◌", "~"),
    "waiting": ("·", "."),
    "dead": ("✗", "x"),
    "expired": ("⊗", "X"),
    "cancelled": ("⊘", "/"),
    "skipped": ("–", "-"),
}
# In the order in which they are worth looking at, and those that are so by name even of many jobs.
_WORTH = ("dead", "expired", "stopping", "running")
_STATES = (*_WORTH, "ready", "staged", "cancelled", "waiting", "skipped", "succeeded")
_MOST_LISTED, _MOST_FAILURES, _MOST_ON_A_PATH, _MOST_PARENTS = 60, 20, 12, 8
_WIDE = 120  # columns where nobody says how many there are


def _has_unicode() -> bool:
    """Whether what is printed may be drawn with more than ASCII."""
    try:
        "✓●─►╰…".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


# ── the graph ────────────────────────────────────────────────────────────────────────────────────────────────────


def _graph_of(workflow: Document) -> Document:
    """Nodes and edges of a workflow's document, as a run of it has them."""
    from tocsin.model.graph import Dependency, Graph

    jobs = workflow["jobs"]
    wanted = {name: job.get("depends_on", ()) for name, job in jobs.items()}
    graph = Graph(
        {
            name: [Dependency(job=each) if isinstance(each, str) else Dependency(**each) for each in parents]
            for name, parents in wanted.items()
        }
    )
    layers = graph.layers
    return {
        "nodes": [{"name": name, "layer": layers[name], "map": jobs[name].get("map")} for name in graph.order],
        "edges": [{"from": p.job, "to": name, "on": p.on} for name in graph.order for p in graph.parents[name]],
    }


def _picture(run: Document, width: int, height: int | None = None) -> list[Line]:
    """The graph of a run or of a workflow; a summary if there is no room for it."""
    nodes, edges = run["nodes"], run["edges"]
    unicode = _has_unicode()
    wants = _wants(edges)
    jobs = [_job(node, wants.get(node["name"], ""), run.get("now"), unicode) for node in nodes]
    drawn = draw(jobs, ((edge["from"], edge["to"]) for edge in edges), width, UNICODE if unicode else ASCII)
    if drawn is not None and (height is None or len(drawn) <= height):
        return drawn
    if len(nodes) <= (height or _MOST_LISTED):
        return _list(jobs, edges)
    return _summary(nodes, jobs, height, unicode)


def _wants(edges: Iterable[Document]) -> dict[str, str]:
    """On which ends of its parents each job runs that does not want success of all."""
    by_child: dict[str, dict[str, str]] = {}
    for edge in edges:
        by_child.setdefault(edge["to"], {})[edge["from"]] = edge["on"]
    found = {}
    for child, parents in by_child.items():
        ends = set(parents.values())
        if len(ends) > 1:
            found[child] = ", ".join(f"on {on} of {parent}" for parent, on in parents.items() if on != "success")
        elif ends != {"success"}:
            found[child] = f"on {ends.pop()}"
    return found


def _job(node: Document, wants: str, now: str | None, unicode: bool) -> Job:
    state = node.get("state")
    if state is None:
        tail = ", ".join(filter(None, (f"for each of {node['map']['over']}" if node["map"] else "", wants)))
        return Job(node["name"], node["layer"], tail=tail)
    tail = ", ".join(filter(None, (*_so_far(node, now), wants if state in ("waiting", "skipped") else "")))
    return Job(node["name"], node["layer"], _mark(state, unicode), tail, colour(state))


def _mark(state: str, unicode: bool) -> str:
    """The mark of a state; one that nobody knows yet is a question."""
    return MARKS.get(state, ("?", "?"))[0 if unicode else 1]


def _so_far(node: Document, now: str | None) -> Iterator[str]:
    """What there is to tell of a job beside its state."""
    if node["elements"]:
        yield f"{node['elements'].get('succeeded', 0)}/{sum(node['elements'].values())}"
    if node["attempt"] > 1:
        yield f"try {node['attempt']}"
    if node["blocked_by"] not in (None, "parent"):
        yield str(node["blocked_by"])
    yield milliseconds(node["duration_ms"]) or _since(node["started_at"], now)


def _since(start: str | None, now: str | None) -> str:
    began, here = instant(start), instant(now)
    return length(here - began) if began is not None and here is not None and here > began else ""


# ── too large to draw ────────────────────────────────────────────────────────────────────────────────────────────


def _list(jobs: Sequence[Job], edges: Iterable[Document]) -> list[Line]:
    """Job by job, each with what it waits for."""
    parents: dict[str, list[str]] = {}
    for edge in edges:
        parents.setdefault(edge["to"], []).append(edge["from"])
    labels = {job.name: job.label() for job in jobs}
    width = max(map(len, labels.values()))
    lines: list[Line] = []
    layer = -1
    for job in sorted(jobs, key=lambda job: job.layer):
        few = parents.get(job.name, [])
        after = ", ".join(few if len(few) <= _MOST_PARENTS else [*few[:_MOST_PARENTS], f"{len(few):,} in all"])
        number = "" if job.layer == layer else str(job.layer)
        behind = f"{' ' * (width - len(labels[job.name]))}  after {after}" if after else ""
        lines.append([(f"{number:>4}  ", "dim"), (labels[job.name], job.style), (behind, "dim")])
        layer = job.layer
    return lines


def _summary(nodes: Sequence[Document], jobs: Sequence[Job], height: int | None, unicode: bool) -> list[Line]:
    """Layer by layer how many there are in which state, and those that are worth looking at by name."""
    layers: dict[int, Counter[str]] = {}
    for node in nodes:
        layers.setdefault(node["layer"], Counter())[node.get("state") or ""] += 1
    room = height or _MOST_LISTED
    few = sorted(layers)
    most = max(2, room // 2)
    if len(few) > most:
        few = [*few[: most // 2], -1, *few[-(most - most // 2 - 1) :]]
    lines: list[Line] = [
        [(f"  ... {len(layers) - len(few) + 1:,} layers more", "dim")]
        if layer < 0
        else _layer(layer, layers[layer], unicode)
        for layer in few
    ]
    rank = {state: place for place, state in enumerate(_WORTH)}
    worth = [
        (rank[node["state"]], node, job) for node, job in zip(nodes, jobs, strict=True) if node.get("state") in rank
    ]
    worth.sort(key=lambda each: each[0])
    told = [(node, job) for _, node, job in worth[: max(0, room - len(lines) - 1)]]
    lines += [[(f"{job.label()}{_reason(node)}", job.style)] for node, job in told]
    if told and len(told) < len(nodes):
        lines.append([(f"and {len(nodes) - len(told):,} more jobs", "dim")])
    return lines


def _layer(number: int, states: Mapping[str, int], unicode: bool) -> Line:
    line: list[Span] = [(f"layer {number:>3}  jobs {sum(states.values()):>6,}", "bold")]
    for state in (*_STATES, *(state for state in states if state and state not in MARKS)):
        if states.get(state):
            line.append((f"  {_mark(state, unicode)} {states[state]:,} {state}", colour(state)))
    return line


def _reason(node: Document) -> str:
    told = why(node) if node.get("state") in ("dead", "expired") else ""
    return f"  {told}" if told else ""


# ── how it went ──────────────────────────────────────────────────────────────────────────────────────────────────


def _counts(run: Document) -> str:
    """How many of its jobs are in which state."""
    return ", ".join(f"{run['progress'][each]:,} {each}" for each in _STATES[::-1] if run["progress"].get(each))


def screen(run: Document, width: int, height: int) -> list[Line]:
    """All of a terminal: the run in a line, and its graph below."""
    state = run["state"]
    again = f", retry {run['retries']}" if run["retries"] else ""
    took = milliseconds(run["duration_ms"]) or _since(run["started_at"], run["now"])
    head: Line = [
        (f"{_mark(state, _has_unicode())} {run['workflow_name'] or run['workflow_id']} ", "bold"),
        (f"{state}{again}", colour(state)),
        (f"  {took}  {_counts(run)}", ""),
        (f"  {run['id']}", "dim"),
    ]
    return [head, [], *_picture(run, width, max(4, height - 3)), []]


def _end(run: Document) -> Iterator[Line]:
    """What there is to say of a run that has ended: what failed, what took longest, and what to do."""
    yield from _failures(run)
    path = _longest_way(run)
    if path is not None:
        yield path
    if run["state"] in ("dead", "cancelled"):
        yield [(f"tocsin workflow retry {run['id']} runs again what did not succeed", "dim")]
        if len(_failed(run)) > 1:
            yield [("tocsin run retry RUN runs again one of these, and what was skipped because of it", "dim")]


def _failed(run: Document) -> list[Document]:
    return [node for node in run["nodes"] if node["state"] in ("dead", "expired")]


def _failures(run: Document) -> Iterator[Line]:
    """Each job that failed, why, and where to look."""
    failed = _failed(run)
    for node in failed[:_MOST_FAILURES]:
        yield [
            (f"{node['name']}: {why(node) or node['state']}", colour(node["state"])),
            (f"  run {node['run_id']}", "dim"),
        ]
    if len(failed) > _MOST_FAILURES:
        yield [(f"and {len(failed) - _MOST_FAILURES:,} more", "dim")]


def _longest_way(run: Document) -> Line | None:
    """The chain of jobs that took longest, once there is one."""
    path = run["critical_path"]
    if len(path["nodes"]) < 2:
        return None
    took = {node["name"]: node["duration_ms"] for node in run["nodes"]}
    names = path["nodes"]
    if len(names) > _MOST_ON_A_PATH:
        half = _MOST_ON_A_PATH // 2
        names = [*names[:half], f"... {len(names) - 2 * half:,} more ...", *names[-half:]]
    arrow = " → " if _has_unicode() else " > "
    told = arrow.join(f"{name} {milliseconds(took[name])}" if name in took else name for name in names)
    return [(f"critical path {milliseconds(path['duration_ms'])}: {told}", "")]


class News:
    """Tells what changed between one look at a run and the next, a line each."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, ...]] = {}

    def of(self, run: Document) -> Iterator[str]:
        """What is new; of the first look, what has left the beginning behind."""
        for node in run["nodes"]:
            told = node["state"], node["attempt"], node["reason"], node["elements"]
            if self._seen.get(node["name"], ("waiting", 0, None, None)) != told:
                yield self._line(node["name"], node["state"], *_so_far(node, None), why(node))
            self._seen[node["name"]] = told
        if self._seen.get("", ()) != (run["state"], run["retries"]):
            yield self._line(run["workflow_name"] or run["workflow_id"], run["state"], why(run))
        self._seen[""] = run["state"], run["retries"]

    @staticmethod
    def _line(name: str, *told: str) -> str:
        return "  ".join(part for part in (name, *told) if part)


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────


def _width() -> int:
    return shutil.get_terminal_size((_WIDE, 0)).columns


def print_workflow(workflow: Document, as_json: bool) -> None:
    """A workflow and its graph."""
    print_document(workflow, _workflow_fields, as_json)
    if not as_json:
        print_lines([[], *_picture(_graph_of(workflow), _width())])


def _workflow_fields(workflow: Document) -> Fields:
    yield "id", workflow["id"]
    yield "name", workflow["name"]
    yield "state", workflow["state"]
    yield "version", str(workflow["version"])
    yield "schedule", schedule_words(workflow)
    yield "timezone", (workflow["schedule"] or {}).get("timezone", "")
    yield "next run", when(workflow["next_run_at"], now())
    yield "last run", last_run(workflow)
    yield "jobs", f"{len(workflow['jobs']):,}"
    yield "priority", str(workflow["priority"])
    yield "timeout", workflow["timeout"]
    yield "overlap", workflow["overlap"]
    yield "concurrency", str(workflow["max_concurrency"] or "")
    yield "tags", pairs(workflow["tags"])
    yield "description", workflow["description"]
    yield "updated", local(workflow["updated_at"])


def print_run(run: Document, as_json: bool) -> None:
    """A run with its graph, what failed and what took longest."""
    print_document(run, _run_fields, as_json)
    if not as_json:
        told = list(_end(run))
        print_lines([[], *_picture(run, _width()), *([[], *told] if told else [])])


def _run_fields(run: Document) -> Fields:
    yield "id", run["id"]
    yield "workflow", f"{run['workflow_name'] or ''} {run['workflow_id']} v{run['workflow_version']}".strip()
    yield "state", run["state"]
    yield "why", why(run)
    yield "jobs", _counts(run)
    yield "trigger", run["trigger"]
    yield "retries", str(run["retries"] or "")
    yield "stands for", local(run["logical_at"])
    yield "started", when(run["started_at"], now())
    yield "finished", when(run["finished_at"], now())
    yield "took", milliseconds(run["duration_ms"])
    yield "args", pairs(run["args"])


def print_end(run: Document) -> None:
    """What is left to say of a run that was followed to its end."""
    print_lines(_end(run))
