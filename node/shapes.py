"""The trainable tensors of a run's model, their roles and shapes. Imports torch for models of transformers
alone: what travels in a run can be told without it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, cast

from optim.role import ParameterRole, Role, role_of_shape
from protos.model_tensors import OWN, parse_all

if TYPE_CHECKING:
    from protos.sections import ModelConfig

BYTE_VOCAB: Final = 256
HF_PREFIX: Final = "hf:"
Entry = tuple[str, Role, tuple[int, ...]]


def default_ff(d_model: int) -> int:
    """The feed-forward width of SwiGLU at the cost of a 4 d ReLU one: 8/3 d, rounded to a multiple of 16."""
    return max(16, round(8 * d_model / 3 / 16) * 16)


def roles_of(config: ModelConfig, *, vocab: int = BYTE_VOCAB) -> tuple[ParameterRole, ...]:
    """What :func:`optim.roles.classify` finds in the model, sorted by name; ``vocab`` is the data's number of
    token ids.

    Raises:
        ModelError, RoleError: a model of transformers that cannot be built, or does not fit.
    """
    if config.name.startswith(HF_PREFIX):
        from node.model import model_on_meta
        from optim.roles import classify

        return classify(model_on_meta(config, vocab=vocab))
    entries = _own(config) if config.name == OWN else _llama(config, vocab)
    roles = [role_of_shape(*entry, position) for position, entry in enumerate(entries)]
    return tuple(sorted(roles, key=lambda role: role.name))


def _own(config: ModelConfig) -> Iterator[Entry]:
    return ((one.name, cast("Role", one.role), one.shape) for one in parse_all(config.tensors or ()))


def _llama(config: ModelConfig, data_vocab: int) -> Iterable[Entry]:
    """The tensors of :class:`node.llama.Llama`, as they are registered."""
    d, vocab = config.d_model, data_vocab if config.vocab is None else config.vocab
    ff = default_ff(d) if config.ff is None else config.ff
    layer: tuple[Entry, ...] = (
        ("attention_norm", "vector", (d,)),
        *((f"attention.{name}", "matrix", (d, d)) for name in "qkvo"),
        ("feed_forward_norm", "vector", (d,)),
        ("feed_forward.gate", "matrix", (ff, d)),
        ("feed_forward.up", "matrix", (ff, d)),
        ("feed_forward.down", "matrix", (d, ff)),
    )
    yield "embedding.weight", "embedding", (vocab, d)
    for index in range(config.layers):
        yield from ((f"layers.{index}.{name}.weight", role, shape) for name, role, shape in layer)
    yield "norm.weight", "vector", (d,)
    if not config.tied:
        yield "head.weight", "embedding", (vocab, d)
