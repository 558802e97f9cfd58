"""docs/reference/sdk.md from the SDK's own signatures, docstrings and comments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from tocsin.client import app, context, declared, facade, failures, job, steps, sync, testing, workflow

_PARTS: tuple[tuple[str, type, str], ...] = (
    ("App", app.App, "`from tocsin import App`"),
    ("Job", job.Job, "What `@app.job` makes of a function."),
    ("Run", job.Run, "What `submit` answers."),
    ("Workflow", workflow.Workflow, "What `app.workflow` answers."),
    ("Step", steps.Step, "What `job.step`, `job.on`, `job.map` and `app.step` answer."),
    ("WorkflowRun", workflow.WorkflowRun, "What `submit` of a workflow answers: all that a `Run` is, and more."),
    ("Context", context.Context, "The first argument of a function whose first parameter is named `ctx`."),
    ("Testing", testing.Testing, "What `app.testing()` answers."),
)
_RAISED = (failures.GiveUp, failures.Retry, failures.Superseded, job.RunFailed)
_NOT_SHOWN = {app.App: {"backend"}, testing.Testing: {"submit", "wait", "submit_workflow", "wait_workflow", "register"}}
_NOT_SHOWN |= {job.Job: {"parts"}, steps.Step: {"parts"}}


def page(note: str) -> str:
    """The whole page."""
    parts = "".join(f"## {name}\n\n{intro} {_text(kind)}\n\n{_members(kind)}\n" for name, kind, intro in _PARTS)
    raised = "".join(f"- `{_called(kind)}`: {_text(kind)}\n" for kind in _RAISED)
    return (
        f"{note}# The Python SDK\n\nHow to use it: [for Python teams](../how-to/python.md).\n\n{parts}"
        f"## Options of `@app.job`\n\n{_text(declared.JobOptions)}\n\n{_options(declared.JobOptions)}\n"
        f"## Options of `app.workflow`\n\n{_text(declared.WorkflowOptions)}\n\n{_options(declared.WorkflowOptions)}\n"
        f"## Options of both\n\n{_text(declared.ScheduleOptions)}\n\n{_options(declared.ScheduleOptions)}\n"
        f"## Exceptions\n\n{raised}\n"
        f"## Client, AsyncClient\n\n{_text(sync.Client)} `AsyncClient` has the same methods, to be awaited; its "
        f"lists are asynchronous iterators.\n\n{_line('wait', sync.Client.wait)}"
        f"{_line('wait_workflow', sync.Client.wait_workflow)}{_calls()}"
    )


def _members(kind: type) -> str:
    hidden = _NOT_SHOWN.get(kind, set())
    shown = [(name, member) for name, member in vars(kind).items() if name[0] != "_" and name not in hidden]
    return "".join(_line(name, member) for name, member in shown if inspect.getdoc(member) and _is_member(member))


def _is_member(member: object) -> bool:
    return isinstance(member, property) or inspect.isfunction(member)


def _line(name: str, member: Any) -> str:
    signature = "" if isinstance(member, property) else _signature(member)
    return f"- `{name}{signature}`: {_text(member)}\n"


def _calls() -> str:
    return "".join(_line(name, call._build) for name, call in vars(facade.Calls).items() if hasattr(call, "_build"))


def _called(kind: type) -> str:
    return kind.__name__ if "__init__" not in vars(kind) else f"{kind.__name__}{_signature(kind.__init__)}"


def _signature(call: Callable[..., Any]) -> str:
    found = inspect.signature(call)
    without_self = [p for p in found.parameters.values() if p.name != "self"]
    shown = found.replace(parameters=without_self, return_annotation=inspect.Signature.empty)
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(shown))


def _text(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split())


def _options(of: type) -> str:
    """Each option with its type and the comment behind it."""
    rows = "".join(f"| `{name}` | `{kind}` | {comment} |\n" for name, kind, comment in _declared_options(of))
    return "| option | type | |\n| --- | --- | --- |\n" + rows


def _declared_options(of: type) -> Iterator[tuple[str, str, str]]:
    source = inspect.getsource(of)
    lines = source.splitlines()
    [body] = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign):
            kind = ast.unparse(node.annotation).replace("|", "\\|")
            yield ast.unparse(node.target), kind, lines[node.lineno - 1].partition("  # ")[2]
