"""`tocsin schedule`: look at a schedule before a job has it."""

from typing import Annotated

import typer

from tocsin.cli import jobspec
from tocsin.cli.output import now, print_json
from tocsin.cli.shared import Json, connect, noun
from tocsin.cli.text import instant, plain, relative

_LOCAL = "%a %Y-%m-%d %H:%M:%S %Z"
app = noun("Look at schedules before jobs have them.")


@app.command()
def preview(
    cron: Annotated[str | None, typer.Argument(help='A cron expression such as "0 9 * * MON-FRI".')] = None,
    text: Annotated[str | None, typer.Option(help='Such as "every weekday at 9am" or "tomorrow at noon".')] = None,
    every: Annotated[str | None, typer.Option(help="An interval such as 5m or PT5M.")] = None,
    rrule: Annotated[str | None, typer.Option(help='Such as "FREQ=MONTHLY;BYDAY=-1FR" (RFC 5545).')] = None,
    interval: Annotated[str | None, typer.Option(help="Such as R5/2026-01-01T00:00:00Z/P1D (ISO-8601).")] = None,
    tz: Annotated[str | None, typer.Option(help="Time zone of the schedule; UTC if not given.")] = None,
    starting_at: Annotated[str | None, typer.Option(help="No occurrence before this instant.")] = None,
    until: Annotated[str | None, typer.Option(help="No occurrence after this instant.")] = None,
    jitter: Annotated[str | None, typer.Option(help="Begin each run up to so long later, always the same.")] = None,
    calendar: Annotated[str | None, typer.Option(help="Go by this calendar.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the job that will have it: H and jitter follow from it.")] = None,
    count: Annotated[int, typer.Option(min=1, max=100, help="How many instants.", metavar="N")] = 10,
    as_json: Json = False,
) -> None:
    """Say what a schedule means, when it would fire, and what may surprise."""
    schedule = jobspec.schedule(
        manual=False,
        **{"cron": cron, "text": text, "every": every, "rrule": rrule, "interval": interval},
        **{"timezone": tz, "starting_at": starting_at, "until": until, "jitter": jitter, "calendar": calendar},
    )
    if schedule is None:
        raise typer.BadParameter("give a cron expression, --text, --every, --rrule or --interval")
    with connect() as client:
        answer = client.preview_schedule(schedule, count=count, name=name)
    if as_json:
        print_json(answer)
        return
    typer.echo(plain(answer["description"]))
    for run in answer["runs"]:
        typer.echo(f"  {plain(_in_zone(run, tz or 'UTC'))}  {plain(run)}  {plain(relative(run, now()))}")
    for warning in answer["warnings"]:
        typer.echo(f"warning: {plain(warning)}", err=True)


def _in_zone(text: str, tz: str) -> str:
    """An instant as the clocks of the schedule's zone show it."""
    from tocsin.model.zones import zone

    at = instant(text)
    return text if at is None else at.astimezone(zone(tz)).strftime(_LOCAL)
