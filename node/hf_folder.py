"""What belongs into a folder that ``transformers`` loads: configuration, names of tensors, tokenizer.

The core's own decoder becomes a ``LlamaForCausalLM``. Two things differ between them. Rotary positions turn
the pairs (2i, 2i + 1) of a head's width here, and (i, i + width / 2) there: rows of q and k are reordered,
which leaves their products as they are. And embeddings are scaled by sqrt(d) here and not there: the scale
goes into the matrix, so a tied model gets a head of its own.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from node.hf import HuggingFaceModel
from node.language import LanguageModel, ModelError
from node.llama import NORM_EPS, ROPE_BASE, Llama

TOKENIZER_FILES: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_INNER: Final = "inner."  # how names begin in our wrapper
_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_IN_LAYER: Final = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


class Output(NamedTuple):
    """A tensor to be written: its name, the parameter that it comes from, and what is done to that.

    Its shape is the parameter's.
    """

    name: str
    source: str
    change: Callable[[Tensor], Tensor] = lambda tensor: tensor


def plain_name(name: str) -> str:
    """A parameter's name in the model that the user knows, without our wrapper around it."""
    return name.removeprefix(_INNER)


def folder_outputs(model: LanguageModel, names: Iterable[str]) -> list[Output]:
    """The tensors of a folder for ``transformers``, from the parameters ``names`` of ``model``.

    Raises:
        ModelError: ``transformers`` has no such model.
    """
    if isinstance(model, HuggingFaceModel):
        return [Output(plain_name(name), name) for name in names]
    if not isinstance(model, Llama):
        raise ModelError(f"transformers has no model like {type(model).__name__}: export to a file")
    return [output for name in names for output in _of_llama(name, model)]


def _of_llama(name: str, model: Llama) -> list[Output]:
    scale = math.sqrt(model.embedding.embedding_dim)
    if name == "embedding.weight":
        outputs = [Output("model.embed_tokens.weight", name, lambda tensor: tensor * scale)]
        return outputs if model.head is not None else [*outputs, Output("lm_head.weight", name)]
    if name == "norm.weight":
        return [Output("model.norm.weight", name)]
    if name == "head.weight":
        return [Output("lm_head.weight", name)]
    match = _LAYER.fullmatch(name)
    theirs = _IN_LAYER.get(match.group(2)) if match else None
    if match is None or theirs is None:
        raise ModelError(f"a LlamaForCausalLM has nothing like the parameter {name!r}: export to a file")
    target = f"model.layers.{match.group(1)}.{theirs}.weight"
    if theirs in ("self_attn.q_proj", "self_attn.k_proj"):
        return [Output(target, name, lambda tensor: halves_of_pairs(tensor, model.heads))]
    return [Output(target, name)]


def halves_of_pairs(weight: Tensor, heads: int) -> Tensor:
    """``weight[heads * width, d]`` with the even rows of each head before its odd ones."""
    pairs = weight.view(heads, -1, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def folder_config(model: LanguageModel, dtype: torch.dtype) -> dict[str, Any]:
    """The ``config.json`` of a model whose weights are stored in ``dtype``."""
    name = str(dtype).removeprefix("torch.")
    if isinstance(model, HuggingFaceModel):
        values: dict[str, Any] = model.inner.config.to_diff_dict()  # type: ignore[union-attr, operator]
        values["architectures"] = [type(model.inner).__name__]
        values.pop("dtype", None)
        return {**values, "torch_dtype": name}
    assert isinstance(model, Llama), "there are no others"
    layer: Any = model.layers[0]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.embedding.embedding_dim,
        "intermediate_size": layer.feed_forward.gate.weight.shape[0],
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": name,
    }


def copy_tokenizer(tokenizer: str, source: str, folder: Path) -> str:
    """Put a run's tokenizer into ``folder`` if it is a file that is here.

    ``source`` is where the run's data is. Returns what to tell the user.
    """
    if tokenizer == "bytes":
        if Path(source).suffix in (".bin", ".npy"):
            return f"there is no tokenizer in it: add the one that made {source}"
        return "there is no tokenizer in it: the model's tokens are the bytes of UTF-8"
    file = Path(tokenizer).expanduser()
    if not file.is_file():
        return f"there is no tokenizer in it: {tokenizer} is not here; copy it there as tokenizer.json"
    shutil.copyfile(file, folder / "tokenizer.json")
    for name in TOKENIZER_FILES:
        if (file.parent / name).is_file():
            shutil.copyfile(file.parent / name, folder / name)
    if not (folder / "tokenizer_config.json").exists():
        text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return f"the tokenizer in it is {tokenizer}"
