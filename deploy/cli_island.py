"""The commands `atoll island …`: what happens between the ranks of one site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.options import Json
from deploy.terminal import console

island_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Shard one model over the ranks of a site."
)


@island_app.callback()
def _island() -> None:
    """Keeps `plan` a command of its own."""


@island_app.command("plan", epilog="Example: atoll island plan llama3-70b --ranks 64 --memory 80GB")
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="hf:NAME (extra 'hf'), a run file, llama3-70b or moe-2.4t. Nothing is allocated.",
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, max=1_000_000, help="Ranks to shard over.")],
    optimizer: Annotated[
        str, typer.Option(help="Of the matrices: muon, soap, shampoo, adamw or adam8bit.")
    ] = "muon",
    placement: Annotated[
        str,
        typer.Option(
            help="owner: matrices whole on one rank; ragged: all of it cut; auto: owned where there is room."
        ),
    ] = "auto",
    granularity: Annotated[
        str, typer.Option(help="Of what is cut: element, row, rows:K, block, matrix or elements.")
    ] = "row",
    slack: Annotated[
        float, typer.Option(min=0, max=10, help="What a rank may have beyond the average, as a share of it.")
    ] = 0.1,
    memory: Annotated[str | None, typer.Option(metavar="BYTES", help="Of a rank, such as 80GB.")] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ROWS",
            help="Parts of a fused matrix: '*.qkv_proj.weight=4096,1024,1024', or =3 for equal ones.",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the layouts there, for fully_shard.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which rank would hold what of a model, and whether that is sensible."""
    from deploy import island_command

    question = island_command.Question(
        model=model,
        ranks=ranks,
        optimizer=optimizer,
        placement=placement,
        granularity=granularity,
        slack=slack,
        memory=memory,
        split=tuple(split or ()),
    )
    answer = island_command.answer(question)
    if save is not None:
        save.write_text(answer.plan.plan.to_json() + "\n")
    if as_json:
        typer.echo(json.dumps(island_command.as_json(answer), indent=2, allow_nan=False))
    else:
        console().print(island_command.view(answer))
