"""The model of a run: from its configuration to a module with initial weights, or to shapes alone.

Shapes follow from the configuration, weights from the seed, on every machine to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from node.language import LanguageModel, ModelError
from node.llama import Llama
from node.shapes import BYTE_VOCAB, HF_PREFIX, default_ff
from protos.model_tensors import OWN

__all__ = [
    "HF_PREFIX",
    "LanguageModel",
    "LlamaShape",
    "ModelConfig",
    "ModelError",
    "build_model",
    "model_on_meta",
    "resolve_vocab",
]


class ModelConfig(Protocol):
    """The ``[model]`` section of a run file, as far as the model reads it."""

    @property
    def name(self) -> str:
        """``"llama"``, or ``"hf:"`` and a folder, a ``config.json`` or a hub id."""

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""

    @property
    def layers(self) -> int:
        """Number of layers."""

    @property
    def heads(self) -> int:
        """Attention heads; they divide ``d_model`` into an even head width."""

    @property
    def ff(self) -> int | None:
        """Width of the feed-forward part; ``None``: 8/3 d rounded to a multiple of 16."""

    @property
    def context(self) -> int:
        """Tokens a prediction can look back on."""

    @property
    def vocab(self) -> int | None:
        """Token ids; ``None``: as many as the data has."""

    @property
    def tied(self) -> bool:
        """Whether the embedding is the head as well."""


@dataclass(frozen=True)
class LlamaShape:
    """Configuration of the core's own decoder; the defaults are a model of 117,056 parameters for bytes."""

    d_model: int = 64
    layers: int = 2
    heads: int = 2
    ff: int | None = None
    context: int = 64
    vocab: int | None = None
    tied: bool = True
    name: str = "llama"


def resolve_vocab(config: ModelConfig, data_vocab: int) -> int:
    """The vocabulary to build: the configured one, or the data's where none is configured.

    Raises :class:`ModelError` if the configured one is too small for the data.
    """
    if config.vocab is None:
        return data_vocab
    if config.vocab < data_vocab:
        raise ModelError(
            f"[model] vocab is {config.vocab}, but the data has {data_vocab} token ids; "
            f"leave vocab out or set it to at least {data_vocab}"
        )
    return config.vocab


def build_model(
    config: ModelConfig, seed: int, *, vocab: int = BYTE_VOCAB, device: torch.device | str = "cpu"
) -> LanguageModel:
    """The model of ``config`` with the weights of ``seed`` in fp32, on ``device``.

    ``vocab`` is the data's number of token ids, 256 for bytes. The weights depend on ``config`` and ``seed``
    alone: not on torch's global generators (which are left as they were), threads, or the kind of CPU.
    Raises :class:`ModelError` for shapes that cannot be.
    """
    model: LanguageModel
    if config.name.startswith(HF_PREFIX):
        from node.hf import build_hf

        model = build_hf(config, seed, vocab)
    else:
        shape = _llama_shape(config, vocab)
        with torch.device("cpu"):
            decoder = _llama(shape)
        decoder.initialize(seed)
        model = decoder
    return model.to(device)


def model_on_meta(config: ModelConfig, *, vocab: int = BYTE_VOCAB) -> LanguageModel:
    """The same module without memory: names, shapes and ties of its parameters, on the meta device.

    Raises :class:`ModelError` as :func:`build_model` does.
    """
    if config.name.startswith(HF_PREFIX):
        from node.hf import build_hf

        return build_hf(config, None, vocab)
    shape = _llama_shape(config, vocab)
    with torch.device("meta"):
        return _llama(shape)


def _llama(shape: LlamaShape) -> Llama:
    assert shape.ff is not None and shape.vocab is not None, "_llama_shape fills these in"
    decoder = Llama(
        d=shape.d_model,
        layers=shape.layers,
        heads=shape.heads,
        ff=shape.ff,
        context=shape.context,
        vocab=shape.vocab,
        tied=shape.tied,
    )
    return decoder.to(torch.float32)  # whatever torch's default dtype is


def _llama_shape(config: ModelConfig, vocab: int) -> LlamaShape:
    """``config`` with every derived value filled in and every rule checked."""
    if config.name == OWN:
        raise ModelError(
            "the model of this run is made by a script ([model] name is 'own'): start that script instead, "
            "which takes part by atoll.join(INVITE), or trains alone by atoll.local(FILE)"
        )
    if config.name != "llama":
        raise ModelError(
            f"[model] name is {config.name!r}; it is 'llama' or 'hf:' and a folder, a config.json or a hub id"
        )
    shape = LlamaShape(
        d_model=config.d_model,
        layers=config.layers,
        heads=config.heads,
        ff=default_ff(config.d_model) if config.ff is None else config.ff,
        context=config.context,
        vocab=resolve_vocab(config, vocab),
        tied=config.tied,
    )
    for field in ("d_model", "layers", "heads", "ff", "context", "vocab"):
        if getattr(shape, field) < 1:
            raise ModelError(f"[model] {field} is {getattr(shape, field)}; it is at least 1")
    if shape.d_model % (2 * shape.heads):
        raise ModelError(
            f"[model] d_model {shape.d_model} does not split into {shape.heads} heads of an even width, "
            f"which rotary positions need; make d_model a multiple of {2 * shape.heads}"
        )
    return shape
