"""`tocsin job`: create, list, show, pause, resume, cancel, delete, run."""

from typing import Annotated

import typer

from tocsin.cli import jobspec
from tocsin.cli.output import Column, Document, Fields, now, print_document, print_done, print_ids, print_list
from tocsin.cli.shared import (
    DEFAULT_LIMIT,
    Ids,
    JobRef,
    Json,
    Limit,
    Reason,
    assignments,
    connect,
    find_job,
    find_job_id,
    json_object,
    noun,
    page_size,
    tag_filter,
)
from tocsin.cli.text import local, pairs, relative, when

app = noun("Create jobs and look after them.")

_KINDS = ("text", "cron", "every", "interval", "rrule", "at", "delay", "manual")


def schedule_words(job: Document) -> str:
    """A schedule in few words."""
    schedule = job.get("schedule") or {}
    if schedule.get("description"):
        return str(schedule["description"])
    kind = next((k for k in _KINDS if schedule.get(k)), None)
    return "once" if kind is None else "manual" if kind == "manual" else f"{kind} {schedule[kind]}"


def target_words(job: Document) -> str:
    """A target in few words."""
    target = job.get("target") or {}
    if target.get("command"):
        return " ".join(map(str, target["command"]))
    return str(target.get("function") or target.get("url") or target.get("image") or target.get("kind") or "")


def _last_run(job: Document) -> str:
    last = job.get("last_run") or {}
    return f"{last.get('state', '')} {relative(last.get('finished_at'), now())}".strip()


COLUMNS = [
    Column("ID", lambda job: job["id"], whole=True),
    Column("NAME", lambda job: job.get("name")),
    Column("STATE", lambda job: job["state"]),
    Column("SCHEDULE", schedule_words),
    Column("NEXT RUN", lambda job: relative(job.get("next_run_at"), now())),
    Column("LAST RUN", _last_run, state=True),
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
    yield "last run", _last_run(job)
    yield "runs", target_words(job)
    yield "pool", job.get("pool", "")
    yield "priority", str(job.get("priority", ""))
    yield "timeout", job.get("timeout", "")
    yield "attempts", str((job.get("retry") or {}).get("max_attempts", ""))
    yield "overlap", job.get("overlap", "")
    yield "concurrency", str(job.get("max_concurrency") or "")
    yield "tags", pairs(job.get("tags"))
    yield "stats", pairs(job.get("stats"))
    yield "description", job.get("description", "")
    yield "created", local(job.get("created_at"))
    yield "updated", local(job.get("updated_at"))


def title(job: Document) -> str:
    """A job's name and id, or its id alone."""
    return f"{job['name']} {job['id']}" if job.get("name") else str(job["id"])


@app.command()
def create(
    command: Annotated[
        list[str] | None, typer.Argument(help="What to run: -- program arguments…", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Unique among your live jobs.")] = None,
    cron: Annotated[str | None, typer.Option(help='Such as "0 9 * * MON-FRI".')] = None,
    every: Annotated[str | None, typer.Option(help="An interval such as 5m or PT5M.")] = None,
    text: Annotated[str | None, typer.Option(help='Such as "every weekday at 9am" or "tomorrow at noon".')] = None,
    rrule: Annotated[str | None, typer.Option(help='Such as "FREQ=MONTHLY;BYDAY=-1FR" (RFC 5545).')] = None,
    interval: Annotated[str | None, typer.Option(help="Such as R5/2026-01-01T00:00:00Z/P1D (ISO-8601).")] = None,
    at: Annotated[str | None, typer.Option(help="Once, at 2026-12-01T09:00:00+01:00.")] = None,
    delay: Annotated[str | None, typer.Option(help="Once, so long from now.")] = None,
    manual: Annotated[bool, typer.Option("--manual", help="Only when asked for.")] = False,
    tz: Annotated[str | None, typer.Option(help="Time zone of the schedule; UTC if not given.")] = None,
    starting_at: Annotated[str | None, typer.Option(help="No occurrence before this instant.")] = None,
    until: Annotated[str | None, typer.Option(help="No occurrence after this instant.")] = None,
    jitter: Annotated[str | None, typer.Option(help="Begin each run up to so long later, always the same.")] = None,
    python: Annotated[str | None, typer.Option(help="A function of the workers instead of a command.")] = None,
    kwargs: Annotated[str | None, typer.Option(help="Its arguments, a JSON object.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="A variable of the command.", metavar="NAME=VALUE")] = None,
    cwd: Annotated[str | None, typer.Option(help="The command's folder on the worker.")] = None,
    pool: Annotated[str | None, typer.Option(help="Which workers.")] = None,
    priority: Annotated[int | None, typer.Option(help="0 to 1000, 1000 first.")] = None,
    timeout: Annotated[str | None, typer.Option(help="Longest time of one attempt.")] = None,
    max_attempts: Annotated[int | None, typer.Option(help="How often it may fail before it is dead.")] = None,
    overlap: Annotated[str | None, typer.Option(help="skip, queue, queue_all or allow.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="How many of its runs at once.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="A tag.", metavar="NAME=VALUE")] = None,
    description: Annotated[str | None, typer.Option(help="For people.")] = None,
    file: Annotated[str | None, typer.Option(help="A job document in JSON; - reads standard input.")] = None,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Create a job. Without a schedule it runs now, once."""
    flags = jobspec.compact(
        name=name,
        schedule=jobspec.schedule(
            manual=manual,
            **{"cron": cron, "every": every, "text": text, "rrule": rrule, "interval": interval, "at": at},
            **{"delay": delay, "timezone": tz, "starting_at": starting_at, "until": until, "jitter": jitter},
        ),
        target=jobspec.target(command=command, python=python, kwargs=kwargs, env=assignments(env, "--env"), cwd=cwd),
        pool=pool,
        priority=priority,
        timeout=timeout,
        retry=jobspec.compact(max_attempts=max_attempts),
        overlap=overlap,
        max_concurrency=max_concurrency,
        tags=assignments(tag, "--tag"),
        description=description,
    )
    with connect() as client:
        job = client.create_job(jobspec.choose(file, flags))
    if ids and not as_json:
        print_ids([job])
    else:
        print_document(job, _fields, as_json)


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help="active, paused, cancelled or completed.")] = None,
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
def pause(job: JobRef, reason: Reason = "", as_json: Json = False) -> None:
    """Start no more runs of a job until it is resumed."""
    with connect() as client:
        answer = client.pause_job(find_job_id(client, job), reason)
    print_done(answer, f"paused {title(answer)}", as_json)


@app.command()
def resume(job: JobRef, reason: Reason = "", as_json: Json = False) -> None:
    """End a pause."""
    with connect() as client:
        answer = client.resume_job(find_job_id(client, job), reason)
    following = when(answer.get("next_run_at"), now())
    print_done(answer, f"resumed {title(answer)}" + (f", next run {following}" if following else ""), as_json)


@app.command()
def cancel(
    job: JobRef,
    reason: Reason = "",
    leave_running: Annotated[bool, typer.Option("--leave-running", help="Let its running runs finish.")] = False,
    as_json: Json = False,
) -> None:
    """End a job for good and stop its runs."""
    with connect() as client:
        job_id = find_job_id(client, job)
        answer = client.cancel_job(job_id, reason, running="leave" if leave_running else "stop")
    print_done(answer, f"cancelled {title(answer)}", as_json)


@app.command()
def delete(job: JobRef, as_json: Json = False) -> None:
    """Cancel a job and free its name; its history stays."""
    with connect() as client:
        job_id = find_job_id(client, job)
        print_done(client.delete_job(job_id), f"deleted {job_id}", as_json)


@app.command()
def run(
    job: JobRef,
    args: Annotated[str | None, typer.Option(help="Arguments of the run, a JSON object.", metavar="JSON")] = None,
    at: Annotated[str | None, typer.Option(help="Not now, but at this instant.")] = None,
    priority: Annotated[int | None, typer.Option(help="Instead of the job's.")] = None,
    ids: Ids = False,
    as_json: Json = False,
) -> None:
    """Ask for a run of a job."""
    given = json_object(args, "--args")
    with connect() as client:
        answer = client.run_job(find_job_id(client, job), given, at=at, priority=priority)
    told = f"run {answer['id']} {answer.get('state', '')}; tocsin run logs -f {answer['id']}"
    print_done(answer, told, as_json, ids)
