"""The command `atoll plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.options import Json
from deploy.terminal import console


def plan(
    uplink: Annotated[str, typer.Option(metavar="RATE", help="Of a node: 20mbit, 1gbit, '100 MB/s'.")],
    step_time: Annotated[
        str, typer.Option(metavar="TIME", help="Of a step at a node: forward, backward and optimizer.")
    ],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A run file, for its model, nodes and method.")
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(metavar="N", help="Parameters of a decoder to plan for, such as 720M or 1.5B."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="hf:NAME", help="A Transformers model to plan for (extra 'hf').")
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=2, help="Token ids of the model.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, max=65535, help="Nodes that take part.")] = None,
    downlink: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of a node; as its uplink if not given.")
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="The coordinator's link, each way; as a node's if not given."),
    ] = None,
    latency: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of an exchange beside its bytes; 50ms if not given.")
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="For the matrices of methods with local steps, instead of the preset's."),
    ] = None,
    busy: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="Share of the time in which nodes should compute.")
    ] = 0.9,
    as_json: Json = False,
) -> None:
    """Compare bytes, seconds and memory of the methods over given links, and recommend one."""
    from deploy import plan_command

    question = plan_command.Question(
        uplink=uplink,
        step_time=step_time,
        file=file,
        params=params,
        model=model,
        vocab=vocab,
        nodes=nodes,
        downlink=downlink,
        hub=hub,
        latency=latency,
        codec=codec,
        busy=busy,
    )
    found = plan_command.answer(question)
    if as_json:
        typer.echo(json.dumps(plan_command.as_json(found), indent=2, allow_nan=False))
    else:
        console().print(plan_command.view(found))
