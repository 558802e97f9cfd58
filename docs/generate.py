"""Write docs/errors.md and docs/reference from the code: `python -m docs.generate`. `tests/docs` fails while one of
the pages is stale."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, NamedTuple

import typer

from docs import sdk
from tocsin import errors, settings
from tocsin.cli.main import app
from tocsin.cli.shared import EXIT_CODES
from tocsin.model.access import KEPT, OWN_TERMS, PERMISSIONS, ROLES, SCOPED, allowed, kept_by
from tocsin.model.blockers import CODES
from tocsin.model.states import FINAL, JOB_STATES, LIVE, OPEN_JOB_STATES, RUN_MOVES
from tocsin.node.server import routes, worker_routes

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTE = "<!-- Written by `python -m docs.generate`; change the code, not this page. -->\n"

# What a process or client finds in its environment; `pages` refuses to forget one of them.
_VARIABLES = {
    "TOCSIN_URL": "client, worker, job: where the server is",
    "TOCSIN_KEY": "client: the API key (a worker takes it, too, if there is no `TOCSIN_WORKER_KEY`)",
    "TOCSIN_WORKER_KEY": "worker: a key of role `worker`",
    "TOCSIN_CA": "client, worker: a file with the authorities to trust over HTTPS, instead of the system's",
    "TOCSIN_RUN_ID": "job: the run, the same in every attempt",
    "TOCSIN_JOB_ID": "job: the job",
    "TOCSIN_JOB_NAME": "job: the job's name, if it has one",
    "TOCSIN_ATTEMPT": "job: 1, 2, …",
    "TOCSIN_FENCE": "job: rises with every claim of the run; refuse writes with a lower one",
    "TOCSIN_SCHEDULED_FOR": "job: the instant the run was owed or asked for",
    "TOCSIN_LOGICAL_AT": "job: the instant the run stands for: of a backfill the one it fills, else the same",
    "TOCSIN_ARGS": "job: the run's `args` as JSON",
    "TOCSIN_ARGS_FILE": "job: the file that has them instead, if they are larger than 96 KiB",
    "TOCSIN_PARENTS": "job: the runs that it waited for as JSON, `{name: {run_id, state, result}}`",
    "TOCSIN_PARENTS_FILE": "job: the file that has them instead, if they are larger than 96 KiB",
    "TOCSIN_RUN_TOKEN": "job: a token of this one attempt",
}


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; `head` names the columns, separated by `|`."""
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────


def settings_page() -> str:
    """Every field of `Settings`, and the variables with our prefix that are none."""
    unknown = settings._NOT_SETTINGS ^ _VARIABLES.keys()
    if unknown:
        raise SystemExit(f"docs/generate.py and tocsin/settings.py disagree about {', '.join(sorted(unknown))}")
    rows = [
        (f"`{f.name}`", f"`TOCSIN_{f.name.upper()}`", _default(f), f.metadata["doc"]) for f in fields(settings.Settings)
    ]
    return (
        f"{NOTE}# Settings\n\n"
        "Read once, at start, from the environment. Options of the command line win over them. "
        "An unknown `TOCSIN_…` variable is refused, with the nearest name that exists. Durations are in seconds.\n\n"
        + table("setting|variable|default|meaning", rows)
        + "\n## Variables that are not settings\n\n"
        + table("variable|who reads it, and what it is", [(f"`{k}`", v) for k, v in _VARIABLES.items()])
    )


def _default(field: Field[Any]) -> str:
    if field.default is MISSING:
        return str(getattr(field.default_factory, "__doc__", "")).partition(",")[0]
    value = field.default
    return "(empty)" if value == "" else f"`{str(value).lower() if isinstance(value, bool) else value}`"


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Code(NamedTuple):
    """A stable code, the class it is raised with, and what it says."""

    code: str
    kind: type[errors.ApiProblem]
    says: str


_ATTEMPTS = {
    "arguments": "the arguments do not fit the target; never retried",
    "crashed": "the process that ran the function died",
    "deadline": "the run's deadline passed",
    "drained": "the worker was drained and killed the run after its grace; outcome `lost`",
    "engine": "the container engine or the cluster did not answer, or removed the container",
    "evicted": "the cluster took the pod away",
    "exit": "the program ended with an exit code other than 0",
    "image": "the image could not be pulled",
    "internal": "a bug of the worker; its log says more",
    "lost": "the worker stopped reporting; outcome `lost`",
    "oom": "the run used more memory than its limit",
    "poison": "two workers in a row went down with the run, which is set apart; outcome `lost`, never retried",
    "result": "the result cannot be stored as JSON",
    "result_too_large": "the result exceeds the size limit; never retried",
    "signal": "a signal killed the program",
    "start": "the attempt could not be started, or this worker cannot run it",
    "timeout": "the run took longer than its `timeout`; outcome `timeout`",
    "unreportable": "the attempt ended, but its result or error cannot be encoded or masked",
    "worker": "the worker lost control of the attempt, and does not know whether it still runs",
}


def errors_page() -> str:
    """The classes of problems, and every code that the code raises."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ApiProblem)]
    classes = [
        (str(kind.status), f"`{kind.__name__}`", kind.title, f"`{kind.default_code}`")
        for kind in sorted(kinds[1:], key=lambda k: k.status)
    ]
    found: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for code in _codes({kind.__name__: kind for kind in kinds}):
        says = found[code.code, code.kind.status, code.kind.__name__]
        if code.says and code.says not in says:
            says.append(code.says)
    codes = [
        (f"`{code}`", str(status), f"`{kind}`", "; ".join(sorted(says)))
        for (code, status, kind), says in sorted(found.items())
    ]
    return (
        f"{NOTE}# Errors\n\n"
        "Every error of the API is `application/problem+json` (RFC 9457): `type`, `title`, `status`, `detail`, `code`, "
        "and for input errors `errors: [{path, code, message}]`. Programs go by `status` and `code`, which are stable; "
        "`detail` is for people and may change. What belongs to another tenant answers 404, as if it did not exist.\n\n"
        "## Classes\n\nWhat a problem has that names no code of its own.\n\n"
        + table("status|class|title|code", classes)
        + "\n## Codes\n\nWhat the code raises beyond these, or names in `errors`; `…` stands for what varies.\n\n"
        + table("code|status|class|says", codes)
        + "\n## Error classes of attempts\n\nThe `class` in the `error` of a run: `retry_on` and `give_up_on` name it, "
        "and dead letters are found by it. A Python function that raises has the name of its exception as the class. "
        "Targets of kind `http` have [classes of their own](how-to/http.md). A run that cannot begin has a code "
        "from above as its class.\n\n" + table("class|what happened", [(f"`{k}`", v) for k, v in _ATTEMPTS.items()])
    )


def _codes(kinds: dict[str, type[errors.ApiProblem]]) -> Iterator[Code]:
    for path in sorted((ROOT / "tocsin").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield from (each for code in _code(node, kinds) for each in _spelt_out(code))
            elif isinstance(node, ast.Dict):
                known = {kind.default_code for kind in kinds.values()}
                yield from (code for code in _field_codes(node) if code.code not in known)


def _spelt_out(code: Code) -> Iterator[Code]:
    """A code that is put together, once for each that may come of it."""
    if code.code == "job_…":
        ended = [state for state in JOB_STATES if state not in OPEN_JOB_STATES]
        yield from (code._replace(code=f"job_{state}") for state in ended)
    elif "…" in code.code:
        raise SystemExit(f"docs/generate.py does not know what {code.code!r} stands for ({code.says})")
    else:
        yield code


def _field_codes(entry: ast.Dict) -> Iterator[Code]:
    """The codes of an entry of `errors` that is written out as a literal, with what each says."""
    named = {_text(key): value for key, value in zip(entry.keys, entry.values, strict=True) if key is not None}
    if named.keys() >= {"path", "code", "message"}:
        # Not strict: where the code varies and the message does not, or the other way round, one says enough.
        for code, message in zip(_branches(named["code"]), _branches(named["message"]), strict=False):
            if isinstance(code, ast.Constant):
                yield Code(_text(code), errors.InvalidInput, _text(message).strip("…"))


def _branches(node: ast.expr) -> list[ast.expr]:
    return [*_branches(node.body), *_branches(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _code(call: ast.Call, kinds: dict[str, type[errors.ApiProblem]]) -> Iterator[Code]:
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr="field") if name in kinds and len(call.args) == 3:
            yield Code(_text(call.args[1]), kinds[name], f"{_text(call.args[0])}: {_text(call.args[2])}")
        case ast.Name(id=name) if name in kinds:
            for keyword in call.keywords:
                if keyword.arg == "code":
                    yield Code(_text(keyword.value), kinds[name], _text(call.args[0]) if call.args else "")


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case _:
            return "…"


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────


def cli_page() -> str:
    """Every command with its arguments and options."""
    root: Any = typer.main.get_command(app)
    parts = [
        f"{NOTE}# The command line\n\n{root.help}\n\n"
        f"{EXIT_CODES} Tables and colour only at a terminal; no colour if `NO_COLOR` is set.\n\n"
        "Without `TOCSIN_URL` and `TOCSIN_KEY` the server and key of `credentials.toml` in the home are used.\n\n"
        "Options before the command:\n\n" + _parameters(root)
    ]
    parts += [_command(name, command) for name, command in commands(root)]
    return "\n".join(parts)


def commands(group: Any, prefix: str = "tocsin") -> Iterator[tuple[str, Any]]:
    """Every command below a group, with its full name."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _command(name: str, command: Any) -> str:
    arguments = [_argument(p) for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([name, *(["[OPTIONS]"] if len(arguments) < len(command.params) else []), *arguments])
    return f"## {name}\n\n{command.help}\n\n```\n{usage}\n```\n\n{_parameters(command)}"


def _argument(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper() + ("…" if parameter.nargs == -1 else "")
    return word if parameter.required or word.startswith("[") else f"[{word}]"


def _parameters(command: Any) -> str:
    rows = []
    for p in command.params:
        if p.hidden or p.name in ("install_completion", "show_completion", "help"):
            continue
        if p.param_type_name == "argument":
            rows.append((f"`{_argument(p)}`", p.help or ""))
            continue
        value = "" if p.is_flag else f" {p.metavar or p.name.upper()}"
        default = "" if p.default in (None, "", False) else f" Default: `{p.default}`."
        rows.append((f"`{', '.join(p.opts)}{value}`", (p.help or "") + (" May be repeated." * p.multiple) + default))
    return table("option|meaning", rows) if rows else ""


# ── routes and states ────────────────────────────────────────────────────────────────────────────────────────────


def api_page() -> str:
    """The routes, whom each is open to, and which are not built yet."""
    groups: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for method, path, permission, handler in [*routes.ROUTES, *worker_routes.ROUTES]:
        groups[handler.__name__ == "not_yet"].append((f"`{method} {path}`", PERMISSIONS[permission]))
    return (
        f"{NOTE}# Routes\n\n"
        "Each needs `Authorization: Bearer <key>`; the role is the least that may call it. "
        "Open to everyone: `/healthz`, `/readyz`; to addresses in `TOCSIN_METRICS_FROM` and to platform keys: "
        "`/metrics`. What a refusal means: [errors](../errors.md).\n\n"
        "## Built\n\n"
        + table("route|role", sorted(groups[0], key=_by_path))
        + "\n## Named by the contract, not built yet\n\nThey answer 422 `not_supported`.\n\n"
        + table("route|role", sorted(groups[1], key=_by_path))
    )


def _by_path(row: Sequence[str]) -> tuple[str, str]:
    method, _, path = row[0].strip("`").partition(" ")
    return path, method


def access_page() -> str:
    """Who may do what, and where a key with a scope may go."""
    built = [
        (m, path, p) for m, path, p, handler in [*routes.ROUTES, *worker_routes.ROUTES] if handler.__name__ != "not_yet"
    ]
    calls: dict[str, list[str]] = defaultdict(list)
    for method, path, permission in sorted(built, key=lambda one: (one[1], one[0])):
        calls[permission].append(f"`{method} {path}`")
    of_runs = [p for p in PERMISSIONS if allowed("run", p)]
    rights = [
        (f"`{p}`", *("yes" if allowed(role, p) else "" for role in ROLES)) for p in PERMISSIONS if p not in of_runs
    ]
    kept = [(f"`{path}`", KEPT[SCOPED[path]]) for path in SCOPED]
    closed = sorted({path for _, path, p in built if kept_by(path) is None and allowed("editor", p)})
    return (
        f"{NOTE}# Who may do what\n\n"
        "The tables are `ROLES`, `PERMISSIONS` and `SCOPED` of `tocsin/model/access.py`; the API asks no others. "
        "How to make keys, keep them to some jobs, and rotate them: [keys](../how-to/keys.md).\n\n"
        "## Roles\n\n"
        + table("role|what it is for", [(f"`{role}`", words) for role, words in ROLES.items()])
        + "\n"
        + table("permission|" + "|".join(ROLES), rights)
        + "\nThe token of a run (`TOCSIN_RUN_TOKEN`) is no key: it speaks for its own attempt, has "
        f"{' and '.join(f'`{p}`' for p in of_runs)} and nothing else, and dies with the attempt or with the lease of "
        "its worker.\n\n"
        f"Of its tenant an admin changes {' and '.join(f'`{term}`' for term in OWN_TERMS)}, up to what the server "
        "keeps for everybody; any other field is refused with 403 and named.\n\n"
        "## What each permission opens\n\n"
        + table("permission|calls", [(f"`{p}`", " · ".join(calls[p])) for p in PERMISSIONS if calls[p]])
        + "\n## Keys with a scope\n\nA key that is kept to some jobs may call these, as its role may; the longest "
        "beginning counts. To what is not of its jobs the answer is 404, as if it did not exist.\n\n"
        + table("path, and what is below it|how it is kept there", kept)
        + "\nEverything else is closed to it (403 `out_of_scope`): "
        + ", ".join(f"`{path}`" for path in closed)
        + ".\n"
    )


def states_page() -> str:
    """The life of a run."""
    moves = [(a, b, ", ".join(steps)) for (a, b), steps in RUN_MOVES.items() if steps]
    diagram = "".join(f"    {a} --> {b}: {steps}\n" for a, b, steps in moves)
    ends = "".join(f"    {state} --> [*]\n" for state in FINAL)
    return (
        f"{NOTE}# The states of a run\n\n"
        f"Live (a row in `runs`): {', '.join(f'`{s}`' for s in LIVE)}. "
        f"Final (rows in `history` only): {', '.join(f'`{s}`' for s in FINAL)}. "
        "Final is final. The table is `RUN_MOVES` of `tocsin/model/states.py`.\n\n"
        "```mermaid\nstateDiagram-v2\n    [*] --> staged: submit, plan\n    [*] --> ready: submit, plan\n"
        f"{diagram}{ends}```\n\n" + table("from|to|step", [(f"`{a}`", f"`{b}`", steps) for a, b, steps in moves])
    )


def blockers_page() -> str:
    """What may stand in a run's way."""
    return (
        f"{NOTE}# What may stand in a run's way\n\n"
        "The codes of `blockers` in `GET /v1/runs/{id}/explain`, in the order in which they are named. Codes are "
        "stable; messages are for people and may change. How to read them: [explain](../how-to/explain.md). "
        "The table is `CODES` of `tocsin/model/blockers.py`.\n\n"
        + table("code|meaning", [(f"`{code}`", meaning) for code, meaning in CODES.items()])
    )


PAGES: dict[str, Callable[[], str]] = {
    "errors.md": errors_page,
    "reference/settings.md": settings_page,
    "reference/cli.md": cli_page,
    "reference/api.md": api_page,
    "reference/access.md": access_page,
    "reference/sdk.md": lambda: sdk.page(NOTE),
    "reference/states.md": states_page,
    "reference/blockers.md": blockers_page,
}


def main() -> None:
    """Write every page that is not current."""
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote docs/{name}\n")


if __name__ == "__main__":
    main()
