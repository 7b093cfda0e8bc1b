"""The command `atoll doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.options import Json

if TYPE_CHECKING:
    from deploy.doctor import Finding

EXAMPLES = (
    "Examples: atoll doctor atoll://TOKEN@gpu1.example.org:4600\n\n"
    "atoll doctor journal coordinator.jsonl reef.jsonl lagoon.jsonl"
)
_COLORS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "bad": typer.colors.RED}


def doctor(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="The invite of a run, the folder of a coordinator's journal, logs of --events.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Say what is wrong with a run, and what to do about it. Exit code 1 if something is."""
    from deploy.doctor import examine
    from deploy.evidence import gather

    evidence = gather(sources, lambda text: typer.echo(f"note: {text}", err=True))
    findings = examine(evidence)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            _tell(finding)
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


def _tell(finding: Finding) -> None:
    level = typer.style(f"{finding.level:<5}", fg=_COLORS[finding.level])
    typer.echo(f"{level}{finding.text}")
    if finding.advice:
        typer.echo(f"     {finding.advice}")
