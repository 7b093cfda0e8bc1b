"""The tensors of a model without their values: what the planner plans for.

From a module (on the meta device, so that nothing is allocated), or built in by shape for two large models.
A tensor belongs to the block that is gathered with it: the members of the model's outermost ``ModuleList``,
as one would wrap them one by one; everything else, and what several blocks share, belongs to the root.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Final, NamedTuple

from torch import nn

from node.island.tensors import LayoutError
from optim.roles import ParameterRole, Role, classify

ROOT: Final = ""


class Matrices(NamedTuple):
    """``number`` equal matrices, one after the other in the memory of their tensor."""

    number: int
    rows: int
    columns: int


class Weight(NamedTuple):
    """One parameter as the inventory lists it.

    Attributes:
        name: fully qualified name.
        shape: its shape.
        group: the block it is gathered with, :data:`ROOT` for the rest; frozen tensors and other dtypes than
            float32 have groups of their own, marked behind the block's name.
        role: which update rule fits it.
        matrices: the matrices of a ``matrix``, in memory order: one; the experts of a stack; the parts of a
            fused weight. Empty for other roles and for frozen tensors.
    """

    name: str
    shape: tuple[int, ...]
    group: str
    role: Role
    matrices: tuple[Matrices, ...] = ()


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules to wrap one by one, by name: the members of the outermost lists of modules with parameters.

    They are what ``fully_shard(model, units=…)`` takes for a plan of this inventory.
    """
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                for number, member in enumerate(child):
                    if next(member.parameters(), None) is not None:
                        found[f"{path}.{number}"] = member
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return found


def inventory_of(model: nn.Module, *, split: Mapping[str, int | Sequence[int]] | None = None) -> list[Weight]:
    """The parameters of ``model``, in the order of ``named_parameters()``.

    Args:
        model: not sharded; the meta device will do.
        split: shell-style name pattern to the parts of a fused matrix: how many equal ones, or the rows of
            each (``{"*.qkv_proj.weight": (4096, 1024, 1024)}``).

    Raises:
        LayoutError: for a pattern that matches no matrix, or parts that do not divide its rows.
        RoleError: for a matrix whose parts are columns.
    """
    split = dict(split or {})
    equal = {pattern: parts for pattern, parts in split.items() if isinstance(parts, int)}
    unequal = {pattern: tuple(parts) for pattern, parts in split.items() if not isinstance(parts, int)}
    roles = {id(item.parameter): item for item in classify(model, blocks=equal)}
    groups = _groups(model)
    unused = set(unequal)
    weights: list[Weight] = []
    for name, parameter in model.named_parameters():
        shape, group = tuple(parameter.shape), groups[id(parameter)]
        dtype = str(parameter.dtype).removeprefix("torch.")
        marks = [] if parameter.requires_grad else ["frozen"]
        marks += [] if dtype == "float32" else [dtype]
        if marks:
            group = f"{group} ({', '.join(marks)})"
        item = roles.get(id(parameter))
        if item is None:
            weights.append(Weight(name, shape, group, "vector" if len(shape) < 2 else "embedding"))
            continue
        pattern = next((key for key in unequal if fnmatchcase(name, key)), None)
        unused.discard(pattern or "")
        parts = None if pattern is None else unequal[pattern]
        weights.append(Weight(name, shape, group, item.role, _matrices(item, parts)))
    if unused:
        raise LayoutError(f"no matrix to split matches {sorted(unused)}: patterns match whole names, with *")
    return weights


def _groups(model: nn.Module) -> dict[int, str]:
    """The block of every parameter, by identity; the root for what is not held by one block alone."""
    inside: dict[int, set[str]] = {}
    for name, block in blocks_of(model).items():
        for module in block.modules():
            inside.setdefault(id(module), set()).add(name)
    homes: dict[int, set[str]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                homes.setdefault(id(parameter), set()).update(inside.get(id(module), {ROOT}))
    return {key: next(iter(found)) if len(found) == 1 else ROOT for key, found in homes.items()}


def _matrices(item: ParameterRole, parts: Sequence[int] | None) -> tuple[Matrices, ...]:
    if item.role != "matrix":
        if parts is not None:
            raise LayoutError(f"{item.name}: only a matrix can be split, this is a {item.role}")
        return ()
    slices, rows, columns = item.view
    if parts is None:
        return (Matrices(slices, rows, columns),)
    if slices != 1 or sum(parts) != rows or min(parts, default=0) < 1:
        raise LayoutError(f"{item.name}: parts of {tuple(parts)} rows do not make up its {slices} x {rows}")
    return tuple(Matrices(1, part, columns) for part in parts)


def _linear(name: str, rows: int, columns: int, group: str) -> Weight:
    return Weight(f"{name}.weight", (rows, columns), group, "matrix", (Matrices(1, rows, columns),))


def _norm(name: str, width: int, group: str) -> Weight:
    return Weight(f"{name}.weight", (width,), group, "vector")


def _ends(vocab: int, width: int) -> list[Weight]:
    return [
        Weight("model.embed_tokens.weight", (vocab, width), ROOT, "embedding"),
        _norm("model.norm", width, ROOT),
        Weight("lm_head.weight", (vocab, width), ROOT, "embedding"),
    ]


def llama3_70b() -> list[Weight]:
    """Llama-3-70B (The Llama 3 Herd of Models, arXiv 2407.21783, Table 3): 70.55 billion parameters."""
    width, inner, heads = 8192, 28672, 1024
    weights: list[Weight] = []
    for layer in range(80):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", width, width),
            ("self_attn.k_proj", heads, width),
            ("self_attn.v_proj", heads, width),
            ("self_attn.o_proj", width, width),
            ("mlp.gate_proj", inner, width),
            ("mlp.up_proj", inner, width),
            ("mlp.down_proj", width, inner),
        ):
            weights.append(_linear(f"{at}.{name}", rows, columns, at))
        weights.append(_norm(f"{at}.input_layernorm", width, at))
        weights.append(_norm(f"{at}.post_attention_layernorm", width, at))
    return [*weights, *_ends(128_256, width)]


def moe_2t4() -> list[Weight]:
    """A mixture of experts of 2.4 trillion parameters: latent attention, 84 layers of 256 routed experts and
    a shared one, every matrix a tensor of its own (65,268 of them)."""
    width, inner, experts, latent = 10_240, 3_584, 256, 1_536
    weights: list[Weight] = []
    for layer in range(84):
        at = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_a_proj", latent, width),
            ("self_attn.q_b_proj", 128 * 192, latent),
            ("self_attn.kv_a_proj_with_mqa", 576, width),
            ("self_attn.kv_b_proj", 128 * 256, 512),
            ("self_attn.o_proj", width, 128 * 128),
            ("mlp.gate", experts, width),
        ):
            weights.append(_linear(f"{at}.{name}", rows, columns, at))
        for expert in ("mlp.shared_experts", *(f"mlp.experts.{number}" for number in range(experts))):
            weights.append(_linear(f"{at}.{expert}.gate_proj", inner, width, at))
            weights.append(_linear(f"{at}.{expert}.up_proj", inner, width, at))
            weights.append(_linear(f"{at}.{expert}.down_proj", width, inner, at))
        weights.append(_norm(f"{at}.input_layernorm", width, at))
        weights.append(_norm(f"{at}.post_attention_layernorm", width, at))
    return [*weights, *_ends(131_072, width)]


BUILT_IN: Final[Mapping[str, Callable[[], list[Weight]]]] = {
    "llama3-70b": llama3_70b,
    "moe-2.4t": moe_2t4,
}


def elements(weights: Sequence[Weight]) -> int:
    """Elements of all of them together."""
    return sum(prod(weight.shape) for weight in weights)
