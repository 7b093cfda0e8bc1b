"""A text that a trained checkpoint writes."""

from __future__ import annotations

from pathlib import Path

import torch

from node.checkpoint import find, load_parameters
from node.data import open_data
from node.model import build_model
from protos.runfile import RunFile


def generate(folder: Path, prompt: str, tokens: int, *, temperature: float = 0.6, seed: int = 0) -> str:
    """``prompt`` continued by ``tokens`` tokens of the newest checkpoint in ``folder``.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        DataError, ModelError: its run's data or model cannot be opened here.
    """
    path = find(folder)
    runfile = RunFile.load(path / "run.toml")
    data = open_data(runfile.data, runfile.model.context)
    model = build_model(runfile.model, runfile.run.seed, vocab=data.vocab)
    load_parameters(path, dict(model.named_parameters()))
    generator = torch.Generator().manual_seed(seed)
    text = model.generate(data.encode(prompt), tokens, temperature, generator)
    return data.decode(text)
