"""What a tensor costs the rank that holds it: bytes while it rests, FLOPs of the optimizer's step.

A rank keeps, of every entry that it holds, the fp32 weight, its fp32 gradient and the optimizer's state.
Matrix optimizers work on whole matrices, and some keep factors of a matrix beside its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm, prod
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from node.island.inventory import ROOT, Matrices, Weight
from node.island.tensors import LayoutError, TensorMeta, granularity_of

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FP32: Final = 4
WEIGHT_AND_GRADIENT: Final = 2 * FP32
MOMENTS: Final = 2 * FP32  # of AdamW
ROTATION_EVERY: Final = 10  # steps between two updates of the eigenbases or inverse roots
LARGEST_SIDE: Final = 10_000  # sides longer than it get no factor, as in SOAP's own implementation
QUANTISED: Final = 256  # entries of 8-bit state that share a scale

TAIL, MATRIX, STACK, ROWS = range(4)
"""How a tensor is placed: packed with the other small ones; whole on an owner; one matrix of it after the
other; cut by rows."""


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> float:
    """FLOPs of Muon's orthogonalisation: ``steps`` times X Xᵀ, its square, and their product with X.

    Of ``min(rows, columns)`` = m and n the longer side: 4 m² n + 2 m³ a step.
    """
    m, n = sorted((rows, columns))
    return float(steps * (4 * m * m * n + 2 * m**3))


def soap_flops(rows: int, columns: int) -> float:
    """FLOPs of SOAP (arXiv 2409.11321, Algorithm 3) a step: statistics, into the eigenbasis and back.

    Every :data:`ROTATION_EVERY` steps a power iteration with a QR decomposition of each factor comes on top.
    """
    return sum(6.0 * d * d * e + 14 / 3 * d**3 / ROTATION_EVERY for d, e in _sides(rows, columns))


def shampoo_flops(rows: int, columns: int) -> float:
    """FLOPs of Shampoo (arXiv 1802.09568) a step: statistics and preconditioning, and now and then the
    inverse roots, at 25 d³ for an eigendecomposition."""
    return sum(4.0 * d * d * e + 25 * d**3 / ROTATION_EVERY for d, e in _sides(rows, columns))


def factor_bytes(rows: int, columns: int) -> float:
    """Statistics and their eigenbasis or inverse root of each side: 2 (m² + n²) fp32 entries."""
    return float(sum(2 * FP32 * d * d for d, _ in _sides(rows, columns)))


def _sides(rows: int, columns: int) -> list[tuple[int, int]]:
    return [(d, e) for d, e in ((rows, columns), (columns, rows)) if d <= LARGEST_SIDE]


def _none(rows: int, columns: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Rule:
    """An optimizer as the planner sees it.

    Attributes:
        name: what the user calls it.
        matrix_state: bytes of state of an entry of a matrix.
        state: the same of all other entries.
        flops: of a step on one matrix of so many rows and columns; None for elementwise rules.
        factors: bytes that it keeps of one whole matrix beside its entries.
        unit: entries whose state cannot be divided.
    """

    name: str
    matrix_state: float
    state: float = MOMENTS
    flops: Callable[[int, int], float] | None = None
    factors: Callable[[int, int], float] = _none
    unit: int = 1


RULES: Final[Mapping[str, Rule]] = {
    rule.name: rule
    for rule in (
        Rule("muon", FP32, flops=newton_schulz_flops),
        Rule("adamw", MOMENTS),
        Rule("soap", MOMENTS, flops=soap_flops, factors=factor_bytes),
        Rule("shampoo", FP32, flops=shampoo_flops, factors=factor_bytes),
        Rule("adam8bit", 2 + 2 * FP32 / QUANTISED, 2 + 2 * FP32 / QUANTISED, unit=QUANTISED),
    )
}


def rule_named(name: str) -> Rule:
    """The rule of that name; raises :class:`LayoutError` with the known ones."""
    if name not in RULES:
        raise LayoutError(f"optimizer {name!r} is unknown: use {', '.join(RULES)}")
    return RULES[name]


class Cost(NamedTuple):
    """What one tensor costs; equal tensors have equal costs.

    Attributes:
        kind: :data:`TAIL`, :data:`MATRIX`, :data:`STACK` or :data:`ROWS`.
        numel: its elements.
        entry: bytes of an element with its gradient and state; goes wherever the element goes.
        factors: bytes that whole matrices of it need in addition, all together.
        flops: of a step, all together.
        matrices: as in the inventory, where the rule works on matrices; else empty.
        parts: [matrices, 3]: elements, bytes of factors and FLOPs of each of them.
    """

    kind: int
    numel: int
    entry: float
    factors: float
    flops: float
    matrices: tuple[Matrices, ...]
    parts: Floats


@dataclass(frozen=True)
class Priced:
    """The tensors of a model with their costs: one entry a tensor in every list and array."""

    metas: list[TensorMeta]
    costs: list[Cost]
    groups: list[str]
    group: Integers
    kind: Integers
    numel: Integers
    entry: Floats
    factors: Floats
    flops: Floats

    @cached_property
    def resident(self) -> Floats:
        """Bytes of the whole tensor, factors included."""
        return self.entry * self.numel + self.factors

    @property
    def resting(self) -> Floats:
        """Bytes that an element brings to its rank; the factors of a matrix that is cut are elsewhere."""
        with_factors = self.resident / np.maximum(self.numel, 1)
        result: Floats = np.where(self.kind == ROWS, self.entry, with_factors)
        return result


def price(
    weights: Sequence[Weight], rule: Rule, *, ragged: bool = False, granularity: str | int = "row"
) -> Priced:
    """What each of ``weights`` costs under ``rule``, and where it may be cut.

    Args:
        weights: from an inventory.
        rule: the optimizer of the matrices; all else takes AdamW (or the rule itself, if elementwise).
        ragged: whether everything may be cut at ``granularity``; otherwise matrices stay whole where the
            rule works on them, and vectors always.
        granularity: of what may be cut.

    Raises:
        LayoutError: for an unknown granularity, or an empty model or a name that occurs twice.
    """
    known: dict[tuple[object, ...], int] = {}
    models: list[tuple[TensorMeta, Cost]] = []
    numbers: dict[str, int] = {}
    metas: list[TensorMeta] = []
    of: list[int] = []
    group: list[int] = []
    for weight in weights:
        key = weight[1], weight[3], weight[4]
        number = known.get(key)
        if number is None:
            number = known[key] = len(models)
            models.append(_price(weight, rule, ragged, granularity))
        of.append(number)
        metas.append(_named(models[number][0], weight[0], weight[2]))
        group.append(numbers.setdefault(weight[2], len(numbers)))
    if len({weight[0] for weight in weights}) != len(weights) or not weights:
        raise LayoutError("an inventory lists every tensor once, and at least one")
    costs = [cost for _, cost in models]
    at = np.array(of, np.int64)

    def column(values: Sequence[float], kind: type[np.generic]) -> NDArray[Any]:
        return np.array(values, kind)[at]

    return Priced(
        metas=metas,
        costs=[costs[number] for number in of],
        groups=list(numbers),
        group=np.array(group, np.int64),
        kind=column([cost.kind for cost in costs], np.int64),
        numel=column([cost.numel for cost in costs], np.int64),
        entry=column([cost.entry for cost in costs], np.float64),
        factors=column([cost.factors for cost in costs], np.float64),
        flops=column([cost.flops for cost in costs], np.float64),
    )


def _price(weight: Weight, rule: Rule, ragged: bool, granularity: str | int) -> tuple[TensorMeta, Cost]:
    shape, numel = weight.shape, prod(weight.shape)
    matrices = weight.matrices if rule.flops is not None and numel else ()
    state = rule.matrix_state if weight.role == "matrix" else rule.state
    blocks: tuple[int, ...] = ()
    parts = np.array(
        [
            (rows * columns, rule.factors(rows, columns), rule.flops(rows, columns) if rule.flops else 0.0)
            for count, rows, columns in matrices
            for _ in range(count)
        ]
    ).reshape(-1, 3)
    _, factors, flops = (float(total) for total in parts.cumsum(0)[-1]) if matrices else (0.0, 0.0, 0.0)
    pieces = len(parts)
    if matrices and not ragged:
        kind, unit = (MATRIX, 0) if pieces == 1 else (STACK, numel // pieces)
        if len({item[1:] for item in matrices}) > 1:
            blocks = tuple(rows * columns for count, rows, columns in matrices for _ in range(count))
    elif len(shape) < 2 and not ragged:
        kind, unit = TAIL, 0
    else:
        kind = ROWS
        unit = min(lcm(granularity_of(granularity, shape), rule.unit), max(1, numel))
    meta = TensorMeta(
        weight.name, shape, unit, blocks, state + (factors / numel if numel else 0.0), flops, weight.group
    )
    assert meta.numel == numel  # which also computes it for all clones
    return meta, Cost(kind, numel, WEIGHT_AND_GRADIENT + state, factors, flops, matrices, parts)


def _named(meta: TensorMeta, name: str, group: str) -> TensorMeta:
    """``meta`` under another name. The constructor of a frozen dataclass takes as long as everything else
    that is done for one of the tens of thousands of tensors of a mixture of experts."""
    clone = object.__new__(TensorMeta)
    clone.__dict__.update(meta.__dict__)  # what has been computed from the shape included
    clone.__dict__["name"] = name
    clone.__dict__["group"] = group
    return clone


def cut_by_rows(priced: Priced, index: int, granularity: str | int) -> None:
    """Let the matrices of tensor ``index`` be cut at ``granularity``, or by rows where that would leave them
    whole."""
    meta, numel = priced.metas[index], max(1, int(priced.numel[index]))
    parts = priced.costs[index].parts
    shape = meta.shape[1:] if len(parts) > 1 and len(meta.shape) > 2 else meta.shape  # of one matrix
    unit = granularity_of(granularity, shape)
    if unit >= parts[:, 0].max():
        unit = granularity_of("row", shape)
    state = meta.state_bytes - float(priced.factors[index]) / numel
    priced.metas[index] = replace(meta, granularity=unit, blocks=(), state_bytes=state)
    priced.kind[index] = ROWS


Shape = tuple[tuple[int, ...], int, tuple[int, ...]]


def group_key(metas: Sequence[TensorMeta]) -> tuple[Shape, ...]:
    """What decides of a group's layout: shape, granularity and blocks of its tensors."""
    return tuple((meta.shape, meta.granularity, meta.blocks) for meta in metas)


def largest_unit(shape: tuple[int, ...], granularity: int, blocks: tuple[int, ...]) -> int:
    """Elements of the largest part of such a tensor that no cut may divide."""
    numel = prod(shape)
    return max(blocks) if blocks else (granularity if 0 < granularity < numel else numel)


def largest_matrix(priced: Priced, index: int) -> float:
    """Bytes of the largest matrix of a tensor, with its factors."""
    parts = priced.costs[index].parts
    return float((parts[:, 0] * priced.entry[index] + parts[:, 1]).max())


def gathered_bytes(priced: Priced, compute_bytes: int) -> float:
    """Bytes of what is whole on a rank at the same time, weights and gradients: the root and two blocks."""
    sizes: dict[str, int] = {}
    for name, size in zip(priced.groups, np.bincount(priced.group, priced.numel).tolist(), strict=True):
        block = name.partition(" (")[0]
        sizes[block] = sizes.get(block, 0) + int(size)
    root = sizes.pop(ROOT, 0)
    return float(2 * compute_bytes * (root + sum(sorted(sizes.values())[-2:])))
