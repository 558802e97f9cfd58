"""`tocsin job`: create, put, update, list, show, versions, pause, resume, cancel, delete, run, backfill, …"""

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tocsin.cli import backfill, jobspec
from tocsin.cli.output import (
    Column,
    Document,
    Fields,
    now,
    print_coloured,
    print_document,
    print_done,
    print_ids,
    print_json,
    print_list,
    print_table,
    progress,
)
from tocsin.cli.shared import (
    DEFAULT_LIMIT,
    Ids,
    IfMatch,
    JobRef,
    JobState,
    Json,
    Limit,
    Reason,
    connect,
    find_job,
    find_job_id,
    find_open,
    json_object,
    noun,
    page_size,
    tag_filter,
)
from tocsin.cli.text import local, pairs, plain, relative, when

if TYPE_CHECKING:
    from tocsin.client.sync import Client

app = noun("Create jobs, change them and look after them.")

BATCH = 1000  # what the server takes at once


def schedule_words(job: Document) -> str:
    """A schedule in few words."""
    schedule = job.get("schedule") or {}
    if schedule.get("description"):
        return str(schedule["description"])
    kind = next((k for k in jobspec.KINDS if schedule.get(k)), None)
    return "once" if kind is None else "manual" if kind == "manual" else f"{kind} {schedule[kind]}"


def target_words(job: Document) -> str:
    """A target in few words."""
    target = job.get("target") or {}
    if target.get("command"):
        return " ".join(map(str, target["command"]))
    return str(target.get("function") or target.get("url") or target.get("image") or target.get("kind") or "")


def last_run(job: Document) -> str:
    """How and when the last run ended."""
    last = job.get("last_run") or {}
    return f"{last.get('state', '')} {relative(last.get('finished_at'), now())}".strip()


COLUMNS = [
    Column("ID", lambda job: job["id"], whole=True),
    Column("NAME", lambda job: job.get("name")),
    Column("STATE", lambda job: job["state"], whole=True),
    Column("SCHEDULE", schedule_words),
    Column("NEXT RUN", lambda job: relative(job.get("next_run_at"), now())),
    Column("LAST RUN", last_run, state=True),
]

VERSIONS = [
    Column("VERSION", lambda version: version["version"], whole=True),
    Column("SINCE", lambda version: when(version["since"], now())),
    Column("CHANGED", lambda version: "created" if version["changed"] is None else ", ".join(version["changed"])),
]


def _fields(job: Document) -> Fields:
    yield "id", job["id"]
    yield "name", job.get("name") or ""
    yield "tenant", job.get("tenant") or ""
    yield "state", job["state"]
    yield "version", str(job.get("version", ""))
    yield "schedule", schedule_words(job)
    yield "timezone", (job.get("schedule") or {}).get("timezone", "")
    yield "next run", when(job.get("next_run_at"), now())
    yield "last run", last_run(job)
    yield "runs", target_words(job)
    yield "pool", job.get("pool", "")
    yield "priority", str(job.get("priority", ""))
    yield "timeout", job.get("timeout", "")
    yield "attempts", str((job.get("retry") or {}).get("max_attempts", ""))
    yield "overlap", job.get("overlap", "")
    yield "concurrency", str(job.get("max_concurrency") or "")
    yield "waits for", ", ".join(f"{each['job']} ({each['on']})" for each in job.get("depends_on") or ())
    yield "feeds", ", ".join(f"{each['name'] or each['job']} ({each['on']})" for each in job.get("feeds") or ())
    yield "tags", pairs(job.get("tags"))
    yield "stats", pairs(job.get("stats"))
    yield "description", job.get("description", "")
    yield "created", local(job.get("created_at"))
    yield "updated", local(job.get("updated_at"))


def title(job: Document) -> str:
    """A job's name and id, or its id alone."""
    return f"{job['name']} {job['id']}" if job.get("name") else str(job["id"])


@app.command()
@jobspec.takes_flags
def create(
    flags: jobspec.Flags,
    file: Annotated[
        str | None, typer.Option(help="JSON: a job, or a list of jobs to store together; - reads standard input.")
    ] = None,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Create a job. Without a schedule it runs now, once. A list is stored a thousand at a time, each all or none."""
    given = jobspec.choose(file, flags.document())
    with connect() as client:
        if isinstance(given, list):
            _create_many(client, given, ids, as_json)
            return
        job = client.create_job(given)
    if ids and not as_json:
        print_ids([job])
    else:
        print_document(job, _fields, as_json)


@app.command()
def put(
    name: Annotated[str, typer.Argument(help="The job's name.", metavar="NAME", show_default=False)],
    file: Annotated[str, typer.Option(help="The whole job in JSON; - reads standard input.")],
    if_match: IfMatch = None,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Make the job of this name what a file says: create it, replace it, or leave it if it is that already."""
    spec = jobspec.read(file)
    with connect() as client:
        before = find_open(client, name)
        after = client.put_job(name, spec, if_match=if_match)
    print_done(after, became(before, after), as_json, ids)


@app.command()
@jobspec.takes_flags
def update(
    job: JobRef,
    flags: jobspec.Flags,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field, such as retry.delay='\"5s\"'; null takes away.", metavar="PATH=JSON"),
    ] = None,
    file: Annotated[str | None, typer.Option(help="A JSON merge patch; - reads standard input.")] = None,
    if_match: IfMatch = None,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Change what is named of a job, as a new version; what runs keeps its own. Tags and variables are added."""
    patch = jobspec.patch(file, flags.patch(), set_)
    with connect() as client:
        before = find_job(client, job)
        after = client.update_job(before["id"], patch, if_match=if_match)
    print_done(after, became(before, after), as_json, ids)


def next_run(job: Document) -> str:
    """When it runs next, for the end of a sentence."""
    following = when(job.get("next_run_at"), now())
    return f", next run {following}" if following else ""


def became(before: Document | None, after: Document) -> str:
    """What a job was made, in one sentence."""
    told = next_run(after)
    if before is None or before["id"] != after["id"]:
        return f"created {title(after)}{told}"
    if before["version"] == after["version"]:
        return f"unchanged {title(after)}, version {after['version']}{told}"
    return f"changed {title(after)} to version {after['version']}{told}"


@app.command("list")
def list_(
    state: Annotated[JobState | None, typer.Option(help="Jobs in this state.")] = None,
    tag: Annotated[str | None, typer.Option(help="Jobs with this tag.", metavar="NAME=VALUE")] = None,
    q: Annotated[str | None, typer.Option("--search", "-q", help="Part of a name.")] = None,
    pool: Annotated[str | None, typer.Option(help="Jobs of this pool.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connect() as client:
        found = client.list_jobs(state=state, tag=tag_filter(tag), q=q, pool=pool, limit=page_size(limit))
        print_list(found, COLUMNS, limit=limit, as_json=as_json, ids=ids)


@app.command()
def show(job: JobRef, as_json: Json = False) -> None:
    """Show one job."""
    with connect() as client:
        print_document(find_job(client, job), _fields, as_json)


@app.command()
def versions(
    job: JobRef,
    diff: Annotated[
        tuple[int, int] | None, typer.Option("--diff", help="What differs between two versions.", metavar="A B")
    ] = None,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """List what a job was and is, newest first, and what each version changed; or compare two of them."""
    with connect() as client:
        document = find_job(client, job)
        if diff is not None:
            _print_difference(client, document, *diff, as_json)
            return
        # One more than shown, for what the oldest that is shown changed.
        found = client.job_versions(document["id"], limit=page_size(limit and limit + 1))
        print_list(_with_origin(found, document), VERSIONS, limit=limit, as_json=as_json)


@app.command()
def pause(job: JobRef, reason: Reason = "", if_match: IfMatch = None, as_json: Json = False) -> None:
    """Start no more runs of a job until it is resumed."""
    with connect() as client:
        answer = client.pause_job(find_job_id(client, job), reason, if_match=if_match)
    print_done(answer, f"paused {title(answer)}", as_json)


@app.command()
def resume(job: JobRef, reason: Reason = "", if_match: IfMatch = None, as_json: Json = False) -> None:
    """End a pause."""
    with connect() as client:
        answer = client.resume_job(find_job_id(client, job), reason, if_match=if_match)
    print_done(answer, f"resumed {title(answer)}{next_run(answer)}", as_json)


@app.command()
def cancel(
    job: JobRef,
    reason: Reason = "",
    leave_running: Annotated[bool, typer.Option("--leave-running", help="Let its running runs finish.")] = False,
    if_match: IfMatch = None,
    as_json: Json = False,
) -> None:
    """End a job for good and stop its runs."""
    with connect() as client:
        job_id = find_job_id(client, job)
        running: Literal["leave", "stop"] = "leave" if leave_running else "stop"
        answer = client.cancel_job(job_id, reason, running=running, if_match=if_match)
    print_done(answer, f"cancelled {title(answer)}", as_json)


@app.command()
def delete(job: JobRef, if_match: IfMatch = None, as_json: Json = False) -> None:
    """Cancel a job and free its name; its history stays."""
    with connect() as client:
        answer = client.delete_job(find_job_id(client, job), if_match=if_match)
    print_done(answer, f"deleted {title(answer)}", as_json)


@app.command()
def run(
    job: JobRef,
    args: Annotated[str | None, typer.Option(help="Arguments of the run, a JSON object.", metavar="JSON")] = None,
    at: Annotated[str | None, typer.Option(help="Not now, but at this instant.")] = None,
    priority: Annotated[int | None, typer.Option(help="Instead of the job's.")] = None,
    sensitive: Annotated[bool, typer.Option("--sensitive", help="Seal the arguments.")] = False,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Ask for a run of a job."""
    given = json_object(args, "--args")
    with connect() as client:
        answer = client.run_job(find_job_id(client, job), given, at=at, priority=priority, sensitive=sensitive)
    told = f"run {answer['id']} {answer.get('state', '')}; tocsin run logs -f {answer['id']}"
    print_done(answer, told, as_json, ids)


app.command("backfill")(backfill.begin)


def _span(item: Document) -> str:
    """When it was owed: an instant, or from the first to the last of many."""
    first, last = local(item["from"]), local(item["to"])
    return first if first == last else f"{first} – {last}"


OCCURRENCES = [
    Column("OWED", _span),
    Column("COUNT", lambda item: str(item["count"])),
    Column("STATUS", lambda item: item["status"]),
    Column("STATE", lambda item: item.get("state") or "", state=True),
    Column("REASON", lambda item: item.get("reason") or ""),
    Column("RUN", lambda item: item.get("run_id") or "", whole=True),
]


@app.command()
def occurrences(
    job: JobRef,
    from_: Annotated[
        str | None, typer.Option("--from", help="From this instant on; a day before --to if not given.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="Before this instant, which may be to come; now if not given.")] = None,
    limit: Limit = DEFAULT_LIMIT,
    as_json: Json = False,
) -> None:
    """Show what a job owed and what became of it, oldest first."""
    with connect() as client:
        found = client.occurrences(find_job_id(client, job), from_=from_, to=to, limit=page_size(limit))
        print_list(found, OCCURRENCES, limit=limit, as_json=as_json)


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────


def _create_many(client: "Client", specs: list[Document], ids: bool, as_json: bool) -> None:
    made: list[Document] = []
    if len(specs) > BATCH:
        typer.echo(f"{len(specs)} jobs go {BATCH} at a time; each batch is stored whole or not at all", err=True)
    try:
        with progress(len(specs), "created", BATCH) as advance:
            for start in range(0, len(specs), BATCH):
                batch = _create_batch(client, specs, start)
                made += batch
                advance(len(batch))
    finally:
        if made:  # also if a later batch failed
            _print_made(made, ids, as_json)


def _print_made(made: list[Document], ids: bool, as_json: bool) -> None:
    if as_json:
        print_json({"items": made})
    elif ids:
        print_ids(made)
    elif len(made) <= DEFAULT_LIMIT:
        print_table(made, COLUMNS)
    else:
        typer.echo(f"created: {len(made)}")


def _create_batch(client: "Client", specs: list[Document], start: int) -> list[Document]:
    """Store the batch that begins there. What goes wrong names jobs by their place in the whole list, and says what
    is stored: of a batch that was refused nothing, of one without a clear answer nobody knows."""
    from tocsin.client.core import ApiError, Unreachable

    batch = specs[start : start + BATCH]
    before = f"the first {start} of {len(specs)} jobs are stored, " if start else ""
    nothing = f"{before}none after them" if start else "nothing is stored"
    unclear = f"{before}whether {len(batch)} {'more' if start else 'jobs'} are stored is not known"

    def placed(text: object) -> str:
        return re.sub(r"^jobs\[(\d+)\]", lambda found: f"jobs[{int(found[1]) + start}]", str(text))

    try:
        return list(client.create_jobs(batch)["items"])
    except ApiError as error:
        told = "; ".join(placed(f"{one.get('path')}: {one.get('message')}") for one in error.errors) or error.detail
        refused = error.status < 500 and error.code != "in_flight"
        detail = f"{told}; {nothing if refused else unclear}"
        raise ApiError(error.status, error.code, detail, retry_after=error.retry_after) from None
    except Unreachable as error:
        raise Unreachable(f"{error}; {unclear}") from None


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _with_origin(found: Iterator[Document], job: Document) -> Iterator[Document]:
    """Each version with when it came (`since`) and what it changed (`changed`), as its predecessor tells."""
    newer = next(found, None)
    while newer is not None:
        older = next(found, None)
        changed = None if older is None else [change["path"] for change in _changes(older, newer)]
        yield newer | {"since": older["replaced_at"] if older else job["created_at"], "changed": changed}
        newer = older


def _changes(older: Document, newer: Document) -> list[Document]:
    # The server's words for the schedule only follow what was changed.
    found = jobspec.changes(older["spec"], newer["spec"])
    return [change for change in found if change["path"] != "schedule.description"]


def _print_difference(client: "Client", job: Document, one: int, other: int, as_json: bool) -> None:
    found = _find_versions(client, job, {one, other})
    differences = _changes(found[one], found[other])
    if as_json:
        print_json({"from": one, "to": other, "changes": differences})
        return
    if not differences:
        typer.echo(f"versions {one} and {other} of {plain(title(job))} are the same")
    print_coloured(line for change in differences for line in _difference(change))


def _difference(change: Document) -> Iterator[tuple[str, str]]:
    yield change["path"], "bold"
    for side, sign, colour in (("from", "-", "red"), ("to", "+", "green")):
        if change[side] is not None:
            yield f"  {sign} {json.dumps(change[side], ensure_ascii=False)}", colour


def _find_versions(client: "Client", job: Document, wanted: set[int]) -> dict[int, Document]:
    found: dict[int, Document] = {}
    for version in client.job_versions(job["id"], limit=500):
        if version["version"] in wanted:
            found[version["version"]] = version
        if len(found) == len(wanted):
            return found
    missing = min(wanted - found.keys())
    raise typer.BadParameter(f"there is no version {missing}; the job is at {job['version']}", param_hint="--diff")
