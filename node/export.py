"""The model of a checkpoint for other programs: one ``safetensors`` file, or a folder for ``transformers``.

Tensors go from file to file one at a time; optimizer state stays behind.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from node.cache import replacing
from node.checkpoint import OPTIMIZER, CheckpointError, Meta, find
from node.checkpoint_files import Stored, sync, write_text
from node.checkpoint_meta import META
from node.exchange.tensor_bytes import LayoutError, check_layout, layout
from node.hf_folder import Output, copy_tokenizer, folder_config, folder_outputs, plain_name
from node.language import LanguageModel
from node.model import HF_PREFIX, model_on_meta
from node.tensor_file import Entry, FileLayout, cast
from protos.model_tensors import OWN
from protos.runfile import RunFile

SUFFIX: Final = ".safetensors"
WEIGHTS: Final = "model.safetensors"


class ExportError(RuntimeError):
    """Nothing was exported; the text says why and what to change."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file or folder.
        run, round: which state of which run it is; the round is the next to be trained.
        tensors, nbytes: in it, and bytes of its file of weights.
        note: about the tokenizer of a folder, for people.
    """

    path: Path
    run: str
    round: int
    tensors: int
    nbytes: int
    note: str = ""


def export(source: Path, target: Path, *, dtype: torch.dtype | None = None, force: bool = False) -> Exported:
    """Write the model of a checkpoint.

    Args:
        source: a checkpoint, or a folder of which the newest is taken.
        target: a file if it ends in ``.safetensors``: the model's parameters under its own names, for an
            ``hf:`` model those of ``transformers``. Otherwise a folder for ``from_pretrained``.
        dtype: of floating-point tensors; ``None``: as they are, fp32.
        force: replace a file that is there, or files of these names in a folder that is there.

    Raises:
        ExportError: ``target`` is there already, part of a checkpoint, or cannot be written.
        CheckpointError: there is no checkpoint, or it is damaged.
        RunFileError, ModelError: its run file or model cannot be used here.
    """
    path = find(source)
    meta = Meta.read(path)
    to_file = target.suffix == SUFFIX
    _check_target(target, target.parent if to_file else target, force)
    with Stored(path, meta.model) as stored:
        names = [name for name in stored.names if not name.startswith(OPTIMIZER)]
        try:
            if to_file:
                outputs = [Output(plain_name(name), name) for name in names]
                return _write(stored, outputs, target, meta, dtype)
            runfile = RunFile.load(path / "run.toml")
            model = _model_of(runfile, stored, names, path)
            return _write_folder(stored, model, names, target, meta, runfile, dtype)
        except OSError as error:
            raise ExportError(f"{target} cannot be written: {error.strerror or error}") from error


def _check_target(target: Path, folder: Path, force: bool) -> None:
    if (folder / META).exists():
        raise ExportError(f"{folder} is a checkpoint: export to another folder")
    if target.suffix == SUFFIX:
        if target.is_dir():
            raise ExportError(f"{target} is a folder: choose another name")
        taken = target.exists()
    else:
        if target.exists() and not target.is_dir():
            raise ExportError(f"{target} is a file: name a folder, or a file that ends in {SUFFIX}")
        taken = target.is_dir() and any(target.iterdir())
    if taken and not force:
        raise ExportError(f"{target} exists already: give --force to overwrite it, or choose another name")


def _model_of(runfile: RunFile, stored: Stored, names: Sequence[str], path: Path) -> LanguageModel:
    """The run's model without memory; the vocabulary is known from its embedding, without the data."""
    if runfile.model.name == OWN:
        raise ExportError(f"{path} is of a script's own model: name a file that ends in {SUFFIX}")
    vocab = 1
    if not runfile.model.name.startswith(HF_PREFIX):
        embedding = stored.rows(["embedding.weight"])
        if not embedding:
            raise CheckpointError(
                f"{path} has no 'embedding.weight', which its model {runfile.model.name} has"
            )
        vocab = embedding[0].shape[0]
    model = model_on_meta(runfile.model, vocab=vocab)
    try:
        check_layout(stored.rows(names), layout(dict(model.named_parameters())), str(path))
    except LayoutError as error:
        raise CheckpointError(f"{error}; its run file describes the model {runfile.model.name}") from error
    return model


def _write(
    stored: Stored, outputs: Sequence[Output], target: Path, meta: Meta, dtype: torch.dtype | None
) -> Exported:
    rows = {row.name: row for row in stored.rows({output.source for output in outputs})}
    by_name = {output.name: output for output in outputs}
    plan = FileLayout(
        (
            Entry(name, rows[source].shape, cast(getattr(torch, rows[source].dtype), dtype))
            for name, source, _ in outputs
        ),
        {"format": "pt", "run": meta.run, "round": str(meta.round), "state_digest": meta.state_digest},
    )
    with replacing(target) as file:
        plan.begin(file)
        for name in plan.entries:
            output = by_name[name]
            plan.write(file, name, output.change(stored.read(output.source)))
        file.flush()
        os.fsync(file.fileno())
    return Exported(target, meta.run, meta.round, len(plan.entries), plan.nbytes)


def _write_folder(
    stored: Stored,
    model: LanguageModel,
    names: Sequence[str],
    target: Path,
    meta: Meta,
    runfile: RunFile,
    dtype: torch.dtype | None,
) -> Exported:
    """Written beside ``target`` and renamed; into a folder that is there, its files move one by one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    draft.mkdir()
    try:
        written = _write(stored, folder_outputs(model, names), draft / WEIGHTS, meta, dtype)
        config = folder_config(model, dtype or torch.float32)
        write_text(draft / "config.json", json.dumps(config, indent=2) + "\n")
        note = copy_tokenizer(runfile.data.tokenizer, runfile.data.source, draft)
        sync(draft)
        if target.is_dir() and any(target.iterdir()):
            for file in sorted(draft.iterdir()):
                os.replace(file, target / file.name)
        else:
            os.replace(draft, target)
        sync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Exported(target, written.run, written.round, written.tensors, written.nbytes, note)
