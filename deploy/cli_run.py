"""The commands `atoll run …`: write and check run files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.errors import UserError
from deploy.options import Json, RunFilePath, Sets
from deploy.terminal import console
from protos.methods import PRESETS

run_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Write and check run files.")


@run_app.command("init", epilog="Example: atoll run init run.toml --method muloco-1bit --nodes 4")
def run_init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; - for stdout.")] = Path(
        "run.toml"
    ),
    name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(PRESETS)}.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes to wait for before the first round.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds to train: exchanges between the nodes; if not given, as many as make 512 steps."
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences that each node reads in a step.")] = None,
    source: Annotated[str | None, typer.Option(help="The text: 'shakespeare', a file, a folder.")] = None,
    set_: Sets = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a commented run file."""
    from deploy.preset import merged, run_text, with_rounds

    options = {
        ("run", "name"): name,
        ("method", "name"): method,
        ("run", "nodes"): nodes,
        ("run", "rounds"): rounds,
        ("data", "batch"): batch,
        ("data", "source"): source,
    }
    text = run_text(with_rounds(merged(options, set_ or []), str(file)), str(file))
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UserError(f"{file} exists already; give --force to overwrite it, or another name") from None
    typer.echo(f"wrote {file}; 'atoll run check {file}' shows what it comes to")


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
    from node.model import model_on_meta

    settings, sentences, costs = describe(runfile), advice(runfile), run_costs(runfile)
    island = None if ranks is None else rank_bytes(runfile.method, model_on_meta(runfile.model), ranks)
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
