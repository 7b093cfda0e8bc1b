"""Any causal language model of Hugging Face ``transformers``, with random weights, behind ``hf:``.

``transformers`` is the extra ``hf`` and imported when the first such model is built. Code that comes with a
model is never run (``trust_remote_code`` stays off), and no weights are loaded.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from node.initializer import PortableRandom
from node.language import LanguageModel, ModelError
from protos import extras

if TYPE_CHECKING:
    from node.model import ModelConfig


class HuggingFaceModel(LanguageModel):
    """A ``transformers`` causal LM behind the interface of :class:`~node.language.LanguageModel`."""

    def __init__(self, inner: nn.Module, *, vocab: int, context: int) -> None:
        super().__init__()
        self.inner, self.vocab, self.context = inner, vocab, context

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits ``float[B, T, vocab]`` of ``int64[B, T]``."""
        out: Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return out

    def get_output_embeddings(self) -> nn.Module | None:
        """The head of ``transformers``' model, which may share its weight with the embedding."""
        head: nn.Module | None = getattr(self.inner, "get_output_embeddings", lambda: None)()
        return head


def build_hf(config: ModelConfig, seed: int | None, vocab: int) -> HuggingFaceModel:
    """The fp32 model that ``config.name`` describes: ``hf:`` and a folder, a ``config.json`` or a hub id.

    Width, depth and ties are those of the Hugging Face configuration; ``config.vocab``, where given, replaces
    its vocabulary size. Weights come from ``seed`` alone; with ``seed`` ``None`` the module is on the meta
    device. Raises :class:`ModelError` if the extra is missing, the configuration cannot be read, or it is too
    small for the data's ``vocab`` or for ``config.context``.
    """
    transformers = _transformers()
    source = config.name.removeprefix("hf:")
    if not source:
        raise ModelError("[model] name 'hf:' lacks a folder, a config.json or a hub id behind the colon")
    shape = _configuration(transformers, source)
    if not isinstance(getattr(shape, "vocab_size", None), int):
        raise ModelError(f"{config.name} is not a language model: its configuration has no vocab_size")
    if config.vocab is not None:
        shape.vocab_size = config.vocab
        for special in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if isinstance(getattr(shape, special, None), int) and getattr(shape, special) >= config.vocab:
                setattr(shape, special, None)
    if shape.vocab_size < vocab:
        raise ModelError(
            f"{config.name} has a vocabulary of {shape.vocab_size}, but the data has {vocab} token ids; set "
            f"[model] vocab to {vocab} or use the tokenizer that belongs to this model"
        )
    longest = getattr(shape, "max_position_embeddings", None) or getattr(shape, "n_positions", None)
    if longest is not None and config.context > longest:
        raise ModelError(
            f"[model] context is {config.context}, but {config.name} reads at most {longest} positions; "
            f"lower context to {longest}"
        )
    # The name changed in 4.56. Without it the weights are rounded to the dtype of the checkpoint.
    setattr(shape, "dtype" if hasattr(shape, "dtype") else "torch_dtype", torch.float32)
    inner = _build(transformers, shape, seed, config.name)
    inner.train()
    return HuggingFaceModel(inner, vocab=shape.vocab_size, context=config.context)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            f"a model named 'hf:…' needs the transformers library, which cannot be imported ({error}); "
            f"install it with: {extras.hint('hf')}"
        ) from error


def _configuration(transformers: Any, source: str) -> Any:
    path = Path(source).expanduser()
    where = str(path) if path.exists() else source
    try:
        return transformers.AutoConfig.from_pretrained(where, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"no model configuration in {source!r}: {reason[0] if reason else type(error).__name__}; give a "
            "folder with a config.json, the file itself, or the id of a public model on the hub"
        ) from error


def _build(transformers: Any, shape: Any, seed: int | None, name: str) -> nn.Module:
    def build() -> nn.Module:
        try:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
        except ValueError as error:
            reason = str(error).strip().splitlines()
            raise ModelError(
                f"{name} is not a causal language model that transformers knows: {reason[0]}"
            ) from error
        return model

    if seed is None:
        with torch.device("meta"):
            return build()
    # Other random operations than normal_ and uniform_ stay with torch's generator, which is put back.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), PortableRandom(seed):
        torch.manual_seed(seed)
        return build()
