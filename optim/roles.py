"""The role of every parameter: which update rule fits it, and how it is seen as matrices.

Rules, first match wins:

1. frozen (``requires_grad`` false) or empty: excluded;
2. an override pattern that matches one of its names: that role;
3. owned by a normalisation layer, or fewer than two dimensions: ``vector``;
4. weight of ``nn.Embedding`` or ``nn.EmbeddingBag``, tied to one, or the output head: ``embedding``;
5. a parameter held directly by a module of the user, with ``embed`` or ``token`` in its own name (learned
   positions, class tokens): ``embedding``;
6. everything else: ``matrix``.

The output head is what ``get_output_embeddings()`` returns where the model has it, else the last
``nn.Linear`` in registration order, if the model has no embedding at all (a classifier), or if the layer's
weight has the shape of an embedding, or if its attribute is called like a head. In a model whose head is tied
by calling ``F.linear(x, embedding.weight)`` the last linear layer is none of these and stays a ``matrix``.

A parameter registered under several names (tied) counts once, under its first name.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import get_args

from torch import Tensor, nn

from optim.role import ParameterRole, Role, RoleError, by_role, held

__all__ = ["ParameterRole", "Role", "RoleError", "by_role", "classify", "held"]

HEAD_NAMES = frozenset(
    {"lm_head", "head", "classifier", "unembed", "unembedding", "output_projection", "embed_out"}
)
EMBEDDING_HINTS = ("embed", "token")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_GATES = {"LSTM": 4, "GRU": 3}


def classify(
    model: nn.Module,
    *,
    overrides: Mapping[str, Role] | None = None,
    blocks: Mapping[str, int] | None = None,
) -> tuple[ParameterRole, ...]:
    """Give every trainable parameter of ``model`` a role; see the module's text for the rules.

    Args:
        model: any module.
        overrides: shell-style name pattern (``"*.router.weight"``) to role; the first pattern that matches
            wins.
        blocks: name pattern to the number of equal row blocks of a fused matrix (3 for a fused
            query-key-value weight), so that each block gets its own polar factor. ``nn.MultiheadAttention``
            and the recurrent layers of torch are split without being named.

    Returns:
        The roles, sorted by name.

    Raises:
        TypeError: ``model`` is no module.
        RoleError: for a pattern that matches no trainable parameter, an unknown role, a role that the
            tensor's shape does not allow, or rows that the blocks do not divide.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the first argument must be the model (a torch.nn.Module), not {type(model).__name__}: pass the "
            "model itself and not its parameters, as their roles are told from the modules that hold them"
        )
    overrides, blocks = dict(overrides or {}), dict(blocks or {})
    names, owners = _names_and_owners(model)
    heads = _head_weights(model)
    unused = set(overrides) | set(blocks)
    roles: list[ParameterRole] = []
    for position, (parameter, aliases) in enumerate(names.items()):
        if not parameter.requires_grad or parameter.numel() == 0:
            continue
        pattern = _first_match(overrides, aliases)
        if pattern is None:
            role = _role(parameter, owners[parameter], aliases[0], parameter in heads)
        else:
            unused.discard(pattern)
            role = overrides[pattern]
        block_pattern = _first_match(blocks, aliases)
        count = None
        if block_pattern is not None:
            unused.discard(block_pattern)
            count = blocks[block_pattern]
        view, fan_in = _view(aliases[0], parameter, role, owners[parameter], count)
        roles.append(ParameterRole(aliases[0], parameter, role, view, fan_in, position))
    if unused:
        raise RoleError(
            f"no trainable parameter matches {sorted(unused)}: patterns match whole names such as "
            f"{next((r.name for r in roles), 'layer.weight')!r}, with * for any run of characters"
        )
    return tuple(sorted(roles, key=lambda item: item.name))


def _names_and_owners(
    model: nn.Module,
) -> tuple[dict[Tensor, list[str]], dict[Tensor, list[tuple[nn.Module, str]]]]:
    """All names of each parameter, and the modules (with attribute name) that hold it, in registration
    order."""
    names: dict[Tensor, list[str]] = {}
    owners: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(parameter, []).append(f"{prefix}.{attribute}" if prefix else attribute)
            owners.setdefault(parameter, []).append((module, attribute))
    return names, owners


def _head_weights(model: nn.Module) -> set[Tensor]:
    getter = getattr(model, "get_output_embeddings", None)
    if callable(getter):
        head = getter()
        return {head.weight} if isinstance(head, nn.Module) and isinstance(head.weight, Tensor) else set()
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        return set()
    name, last = linears[-1]
    shapes = {module.weight.shape for module in model.modules() if isinstance(module, _EMBEDDINGS)}
    is_head = not shapes or last.weight.shape in shapes or name.rpartition(".")[2] in HEAD_NAMES
    return {last.weight} if is_head else set()


def _first_match(patterns: Mapping[str, object], aliases: list[str]) -> str | None:
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in aliases)), None)


def _role(parameter: Tensor, owners: list[tuple[nn.Module, str]], name: str, is_head: bool) -> Role:
    if parameter.ndim < 2 or any(isinstance(module, _NORMS) for module, _ in owners):
        return "vector"
    if is_head or any(isinstance(module, _EMBEDDINGS) for module, _ in owners):
        return "embedding"
    direct = not any(type(module).__module__.startswith("torch.nn.") for module, _ in owners)
    if direct and any(hint in name.rpartition(".")[2] for hint in EMBEDDING_HINTS):
        return "embedding"
    return "matrix"


def _fused_blocks(owners: list[tuple[nn.Module, str]]) -> int:
    for module, attribute in owners:
        if isinstance(module, nn.MultiheadAttention) and attribute == "in_proj_weight":
            return 3
        if isinstance(module, nn.RNNBase) and attribute.startswith(("weight_ih", "weight_hh")):
            return _GATES.get(module.mode, 1)
        if isinstance(module, nn.RNNCellBase) and attribute.startswith("weight_"):
            return _GATES.get(type(module).__name__.removesuffix("Cell"), 1)
    return 1


def _stored_transposed(owners: list[tuple[nn.Module, str]]) -> bool:
    # transformers' Conv1D (GPT-2) keeps a linear weight as (in, out); known by name, to avoid the import
    return any(type(module).__name__ == "Conv1D" and hasattr(module, "nf") for module, _ in owners)


def _view(
    name: str, parameter: Tensor, role: Role, owners: list[tuple[nn.Module, str]], count: int | None
) -> tuple[tuple[int, int, int], int]:
    shape = tuple(parameter.shape)
    if role not in get_args(Role):
        raise RoleError(f"{name}: unknown role {role!r}: use one of {', '.join(get_args(Role))}")
    if role != "matrix":
        if count is not None:
            raise RoleError(f"{name}: only a matrix can be split in blocks, this is a {role}")
        return (1, 1, parameter.numel()), 1
    if len(shape) < 2:
        raise RoleError(f"{name}: a tensor of shape {shape} has no matrix view: give it the role vector")
    convolution = next((module for module, _ in owners if isinstance(module, _CONVOLUTIONS)), None)
    if len(shape) == 3 and convolution is None:
        slices, rows, columns = shape
    else:
        slices, rows, columns = 1, shape[0], prod(shape[1:])
    count = _fused_blocks(owners) if count is None else count
    if count < 1 or rows % count:
        raise RoleError(f"{name}: {rows} rows cannot be split into {count} equal blocks")
    fan_in = columns
    if count > 1 and _stored_transposed(owners):
        raise RoleError(
            f"{name}: the blocks of a weight stored as (in, out) are columns, which cannot be split here"
        )
    if isinstance(convolution, _TRANSPOSED):
        fan_in = shape[0] // convolution.groups * prod(shape[2:])
    elif _stored_transposed(owners):
        fan_in = rows
    return (slices * count, rows // count, columns), fan_in
