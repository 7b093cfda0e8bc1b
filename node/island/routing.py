"""Which optimizer may take which part of a sharded model, and on which rank.

A matrix optimizer wants matrices: whole, two-dimensional, one at a time. :func:`route` finds them in the
parameters of a sharded model, those of stacks (experts) and of fused weights (query-key-value) included, and
says for each which rank steps it. Where a rank holds all of a matrix that costs no communication; a matrix
that the layout divides has one rank to which it is gathered for the step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from node.island.layout import LayoutError
from node.island.param_group import ShardedParameter
from node.island.runtime import units_of
from node.island.state import sharded_parameters
from optim.roles import ParameterRole, Role, classify


@dataclass(frozen=True)
class Matrix:
    """One matrix in a sharded parameter.

    Attributes:
        name: the parameter's; with ``#i`` behind it for the i-th of several.
        entry: the parameter.
        start: its first element in the flattened parameter.
        rows, columns: its shape; rows are contiguous.
        fan_in: inputs of one output of the layer.
        worker: the rank that steps it.
        shared: whether several ranks hold parts of it, so that it has to be gathered.
    """

    name: str
    entry: ShardedParameter
    start: int
    rows: int
    columns: int
    fan_in: int
    worker: int
    shared: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def here(self) -> bool:
        """Whether this rank steps it."""
        return self.worker == self.entry.rank

    @property
    def alone(self) -> bool:
        """Whether it is all of its parameter, in the parameter's own shape."""
        return self.entry.meta.shape == (self.rows, self.columns)

    def held(self, rank: int) -> tuple[int, int]:
        """Begin and end, in the flattened parameter, of what ``rank`` holds of it (equal: nothing)."""
        piece = self.entry.layout.piece(self.entry.index, rank)
        if piece is None:
            return self.start, self.start
        low = max(self.start, piece.start)
        return low, max(low, min(self.start + self.numel, piece.start + piece.numel))

    @property
    def flops(self) -> float:
        """Of an optimizer's step, up to a factor: Newton–Schulz iterations."""
        return float(min(self.rows, self.columns)) * self.numel


@dataclass(frozen=True)
class Route:
    """All trainable sharded parameters of a model by what an optimizer may do with them; the same on all
    ranks of a shard group but for :attr:`Matrix.here`.

    Attributes:
        matrices: for a matrix optimizer, by name.
        embeddings: embeddings and output heads, for an elementwise optimizer.
        vectors: norms, biases and scalars, likewise.
    """

    matrices: tuple[Matrix, ...]
    embeddings: tuple[ShardedParameter, ...]
    vectors: tuple[ShardedParameter, ...]

    @property
    def gathered(self) -> tuple[Matrix, ...]:
        """The matrices that several ranks hold parts of."""
        return tuple(matrix for matrix in self.matrices if matrix.shared)


def route(
    model: nn.Module,
    *,
    overrides: Mapping[str, Role] | None = None,
    blocks: Mapping[str, int] | None = None,
    step_owners: Mapping[str, Sequence[int]] | None = None,
) -> Route:
    """Sort the sharded parameters of ``model``. No communication.

    Args:
        model: with sharded units. Ignored parameters are not routed.
        overrides: name pattern to role, see :func:`optim.roles.classify`.
        blocks: name pattern to the number of matrices that are fused in a weight along its rows.
        step_owners: by a parameter's name the rank for each of its matrices, where they are divided. By
            default as the plan says that the model was sharded with, if it counts the same matrices;
            without one, the least busy of the holders.

    Raises:
        LayoutError: for an unknown name or rank in ``step_owners``, or not one rank a matrix.
        RoleError: for patterns that do not fit.
    """
    roles = _global_roles(model, overrides, blocks)
    matrices: list[Matrix] = []
    embeddings: list[ShardedParameter] = []
    vectors: list[ShardedParameter] = []
    chosen = dict(step_owners or {})
    for entry in sorted(sharded_parameters(model), key=lambda entry: entry.name):
        role = roles.get(entry.name)
        if role is None:
            continue
        if role.role == "vector":
            vectors.append(entry)
        elif role.role == "embedding":
            embeddings.append(entry)
        else:
            matrices += _matrices(entry, role)
    for name, ranks in chosen.items():
        named = [matrix for matrix in matrices if matrix.entry.name == name]
        for matrix in named:
            _check_chosen(matrix, ranks)
        if not named:
            raise LayoutError(f"step_owners names {name}, which is no matrix of the model")
    return Route(
        tuple(_assign(matrices, {**_planned(matrices), **chosen})), tuple(embeddings), tuple(vectors)
    )


def _global_roles(
    model: nn.Module, overrides: Mapping[str, Role] | None, blocks: Mapping[str, int] | None
) -> dict[str, ParameterRole]:
    with ExitStack() as stack:
        for _, unit in units_of(model):
            for group in unit.groups:  # unsharded they have the global shapes, whatever their memory
                stack.enter_context(group.holding(group.buffer.unsharded))
        return {role.name: role for role in classify(model, overrides=overrides, blocks=blocks)}


def _matrices(entry: ShardedParameter, role: ParameterRole) -> list[Matrix]:
    slices, rows, columns = role.view
    found = []
    for number in range(slices):
        start = number * rows * columns
        first, last = _holders(entry, start, rows * columns)
        name = entry.name if slices == 1 else f"{entry.name}#{number}"
        found.append(Matrix(name, entry, start, rows, columns, role.fan_in, first, first != last))
    return found


def _holders(entry: ShardedParameter, start: int, numel: int) -> tuple[int, int]:
    """The first and the last rank that hold something of a range."""
    begin = entry.layout.offsets[entry.index] + start
    return bisect_right(entry.layout.cuts, begin) - 1, bisect_left(entry.layout.cuts, begin + numel) - 1


def _planned(matrices: list[Matrix]) -> dict[str, Sequence[int]]:
    """Workers by the plan, of the parameters of which it counts as many matrices as there are here."""
    found: dict[str, Sequence[int]] = {}
    for matrix in matrices:
        workers = matrix.entry.layout.workers[matrix.entry.index] if matrix.entry.layout.workers else ()
        if len(workers) == matrix.entry.meta.numel // matrix.numel:
            found[matrix.entry.name] = workers
    return found


def _assign(matrices: list[Matrix], chosen: Mapping[str, Sequence[int]]) -> list[Matrix]:
    """Give every divided matrix a worker: the largest first, to the least busy rank among its holders."""
    busy: dict[int, list[float]] = {}
    for matrix in matrices:
        comm = matrix.entry.comm
        load = busy.setdefault(id(comm.group), [0.0] * comm.ranks)
        if not matrix.shared:
            load[matrix.worker] += matrix.flops
    result = {matrix.name: matrix for matrix in matrices}
    for matrix in sorted((m for m in matrices if m.shared), key=lambda m: (-m.flops, m.name)):
        load = busy[id(matrix.entry.comm.group)]
        if matrix.entry.name in chosen:
            worker = chosen[matrix.entry.name][matrix.start // matrix.numel]
        else:
            sizes = [(high - low) for low, high in map(matrix.held, range(len(load)))]
            holders = [rank for rank, size in enumerate(sizes) if size]
            worker = min(holders, key=lambda rank: (load[rank], -sizes[rank], rank))
        load[worker] += matrix.flops
        result[matrix.name] = Matrix(**{**matrix.__dict__, "worker": worker})
    return list(result.values())


def _check_chosen(matrix: Matrix, ranks: Sequence[int]) -> None:
    count, size = matrix.entry.meta.numel // matrix.numel, matrix.entry.comm.ranks
    if len(ranks) != count or not all(0 <= rank < size for rank in ranks):
        raise LayoutError(
            f"step_owners gives {matrix.entry.name} the ranks {tuple(ranks)}: it needs {count} of"
            f" 0 … {size - 1}"
        )
