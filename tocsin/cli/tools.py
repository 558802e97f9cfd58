"""`tocsin doctor`, `demo`, `completion`: help for those who use Tocsin."""

from enum import StrEnum
from typing import Annotated

import typer

from tocsin.cli.shared import REFUSED, Json


class Shell(StrEnum):
    """The shells whose completion can be printed."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def doctor(as_json: Json = False) -> None:
    """Say what is wrong here, and what to do; exit code 1 if something failed."""
    from tocsin.cli.doctor import examine, print_findings

    findings = examine()
    print_findings(findings, as_json)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(REFUSED)


def demo(
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long to watch.", metavar="N")] = 20,
) -> None:
    """Show jobs of each kind run, on a Tocsin of its own that leaves nothing behind."""
    from tocsin.cli.demo import run

    raise typer.Exit(run(seconds))


def completion(
    shell: Annotated[Shell, typer.Argument(help="For which shell.", metavar="bash|zsh|fish", show_default=False)],
) -> None:
    """Print the script that makes a shell complete commands and options."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(get_completion_script(prog_name="tocsin", complete_var="_TOCSIN_COMPLETE", shell=shell.value))
