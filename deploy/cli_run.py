"""The commands `atoll run …`: write and check run files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.errors import UserError
from deploy.options import Json, MethodIfGiven, RunFilePath, Sets
from deploy.terminal import console

run_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Write and check run files.")


@run_app.command("init", epilog="Example: atoll run init run.toml --nodes 6 --link 100mbit --step-time 0.5s")
def run_init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; - for stdout.")] = Path(
        "run.toml"
    ),
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    method: MethodIfGiven = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes to wait for before the first round.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds to train: exchanges between the nodes; if not given, as many as make 512 steps."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences that each node reads in a step.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Text or tokens: 'shakespeare', a file, a folder, 'hf:NAME'.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Makes the model of a script that joins by atoll.join.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="Of a node, and of the coordinator: chooses method, local steps and transport, as 'atoll "
            "plan' would.",
        ),
    ] = None,
    step_time: Annotated[str, typer.Option(metavar="TIME", help="Of a step at a node, for --link.")] = "1s",
    set_: Sets = None,
    every: Annotated[bool, typer.Option("--all", help="Write every key, with what it means.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a run file: what is chosen, and what is most often changed."""
    from deploy.preset import merged, run_of, with_rounds
    from protos.runfile_short import short_toml
    from protos.runfile_text import example_toml

    values = merged(
        {
            ("run", "name"): name,
            ("method", "name"): method,
            ("run", "nodes"): nodes,
            ("run", "rounds"): rounds,
            ("data", "batch"): batch,
            ("data", "source"): source,
        },
        set_ or [],
    )
    reasons: dict[tuple[str, str], str] = {}
    if model is not None:
        from deploy.own_model import own_tensors

        reasons["model", "name"] = f"That of {model}, whose script joins by atoll.join."
        values |= {("model", "name"): "own", ("model", "tensors"): own_tensors(model)}
    if link is not None:
        if any(key[0] == "method" or key == ("exchange", "transport") for key in values):
            raise UserError("--link chooses the method and the transport: leave them out")
        chosen, why = _dialled(values, link, step_time)
        values |= chosen
        reasons |= why
    run = run_of(with_rounds(values, str(file)), str(file))
    text = example_toml(run) if every else short_toml(run, reasons)
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UserError(f"{file} exists already; give --force to overwrite it, or another name") from None
    typer.echo(f"wrote {file}; 'atoll run check {file}' shows what it comes to")


def _dialled(
    values: dict[tuple[str, str], Any], link: str, step_time: str
) -> tuple[dict[tuple[str, str], Any], dict[tuple[str, str], str]]:
    """What --link chooses, and why."""
    from deploy.dial import choose
    from deploy.plan_command import Question, situation_of
    from deploy.preset import run_of
    from node.shapes import roles_of

    run = run_of(values)
    situation = situation_of(Question(link, step_time, nodes=run.run.nodes), None)
    choice = choose(roles_of(run.model), situation)
    what = f"For {run.run.nodes} nodes behind {link} and steps of {step_time} (--link)"
    ways = {"hub": "the coordinator's link carries it", "direct": "the coordinator's link would be the limit"}
    return choice.values(), {
        ("method", "name"): f"{what}: {choice.reason}.",
        ("exchange", "transport"): f"{what}: {ways[choice.transport]}.",
    }


@run_app.command("check", epilog="Example: atoll run check run.toml --json")
def run_check(
    file: RunFilePath,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Show the memory of the ranks of such an island, too."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a run file and show its values and the bytes of a round."""
    from protos.runfile import RunFile
    from protos.runfile_text import advice, describe

    runfile = RunFile.load(file)
    from deploy import check
    from deploy.costs import run_costs
    from deploy.memory import rank_bytes

    settings, sentences, costs = describe(runfile), advice(runfile), run_costs(runfile)
    island = None
    if ranks is not None:
        from node.model import model_on_meta

        between = runfile.exchange.transport != "hub"
        island = rank_bytes(runfile.method, model_on_meta(runfile.model), ranks, between=between)
    if as_json:
        values = check.as_json(runfile, settings, costs, sentences)
        if island is not None:
            values["ranks"] = check.ranks_json(island)
        typer.echo(json.dumps(values, indent=2, allow_nan=False))
        return
    out = console()
    out.print(check.values_table(settings))
    out.print(check.bytes_view(runfile, costs))
    if island is not None:
        out.print("", check.ranks_view(island), sep="\n")
    out.print(check.waits_line(runfile), markup=False, highlight=False, soft_wrap=True)
    for sentence in sentences:
        out.print(f"note: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    out.print(f"{file} is fine; digest {runfile.digest}", markup=False, highlight=False, soft_wrap=True)
