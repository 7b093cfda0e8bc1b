"""The command `atoll export`."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from deploy.options import Json

EXAMPLES = (
    "Examples: atoll export checkpoints -o model.safetensors\n\n"
    "atoll export checkpoints/round-00000200 -o my-model --dtype bf16\n\n"
    "then in Python: AutoModelForCausalLM.from_pretrained('my-model')"
)


class Precision(str, Enum):
    """Dtypes that a user can choose, by the names used here."""

    fp32 = "fp32"
    bf16 = "bf16"


def export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="A checkpoint, or a folder of checkpoints: the newest."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="A file if it ends in .safetensors, with the model's own names; else a folder that "
            "from_pretrained of transformers loads.",
        ),
    ],
    dtype: Annotated[Precision, typer.Option(help="Of the weights in the file.")] = Precision.fp32,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint's model for other programs: a safetensors file or a Hugging Face folder."""
    import torch

    from node.export import export as write

    wanted = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}[dtype]
    written = write(folder, out, dtype=wanted, force=force)
    if as_json:
        typer.echo(json.dumps({**asdict(written), "path": str(written.path)}))
        return
    typer.echo(
        f"wrote {written.path}: {written.tensors} tensors, {written.nbytes:,} bytes, run {written.run} "
        f"after {written.round} rounds"
    )
    if written.note:
        typer.echo(written.note)
