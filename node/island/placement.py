"""Which rank holds what, decided for one wrapped module at a time.

Placement by words: ``owner`` keeps every matrix whole on one rank (stacks of matrices one by one, embeddings
and output heads by rows) and every unit's vectors together on another; ``ragged`` cuts all of it evenly at a
granularity. A :class:`~node.island.layout.Plan` says it for the whole model; :class:`BoundPlan` knows which
parameter has which name in it, for wrapping block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from node.island.layout import GroupLayout, LayoutError, Plan, TensorMeta, granularity_of, owned, ragged
from optim.roles import classify

WHOLE, ROWS = 0, -1

Granularity = str | int | Callable[[str, nn.Parameter], "str | int | Sequence[int]"]
Placement = str | Callable[[str, nn.Parameter], str] | Plan


class Placed(NamedTuple):
    """A group: its layout, and the names of its tensors in the layout's order."""

    layout: GroupLayout
    names: list[str]


class BoundPlan:
    """A plan whose names are looked up by parameter, so that blocks can be wrapped before their root.

    Args:
        plan: made for ``model``.
        model: not sharded yet.
    """

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan = plan
        self._names = WeakIdKeyDictionary()
        for name, parameter in model.named_parameters():
            self._names[parameter] = name

    def name(self, parameter: Tensor) -> str:
        """The parameter's name in the plan; raises :class:`LayoutError` if it has none."""
        if parameter not in self._names:
            raise LayoutError(
                f"the plan was bound to a model without this parameter of shape {tuple(parameter.shape)}"
            )
        return str(self._names[parameter])


@dataclass
class Rules:
    """Placement by words.

    Attributes:
        placement: ``"owner"``, ``"ragged"``, or a function of name and parameter that returns one of them.
        granularity: of ragged tensors: see :func:`~node.island.layout.granularity_of`; a function may also
            return the rows of successive unequal blocks.
        loads: elements each rank holds from earlier units; brought up to date.
        natural: what :func:`natural_units` says of the module.
    """

    placement: str | Callable[[str, nn.Parameter], str]
    granularity: Granularity
    loads: list[float]
    natural: dict[int, int]

    def place(self, parameters: dict[str, nn.Parameter]) -> list[Placed]:
        """The groups of one unit's ``parameters``."""
        groups: dict[tuple[str, bool, str], list[TensorMeta]] = {}
        for name, parameter in parameters.items():
            kind, meta = self._decide(name, parameter)
            groups.setdefault((kind, parameter.requires_grad, str(parameter.dtype)), []).append(meta)
        placed = []
        for (kind, _, _), metas in groups.items():
            if kind == "owner":
                layout = owned(metas, spread_owners(metas, self.loads), len(self.loads))
            else:
                layout = ragged(metas, len(self.loads))
                for rank in range(len(self.loads)):
                    self.loads[rank] += layout.resident(rank)
            placed.append(Placed(layout, [meta.name for meta in metas]))
        return placed

    def _decide(self, name: str, parameter: nn.Parameter) -> tuple[str, TensorMeta]:
        shape = tuple(parameter.shape)
        kind = self.placement if isinstance(self.placement, str) else self.placement(name, parameter)
        if kind not in ("owner", "ragged"):
            raise LayoutError(f"{name}: placement {kind!r} is unknown: use owner, ragged or a plan")
        natural = self.natural.get(id(parameter), WHOLE)
        if kind == "owner":
            # said of everything it means whole matrices where there are any; said of one tensor, that tensor
            if natural == WHOLE or callable(self.placement):
                return "owner", TensorMeta(name, shape)
            if natural != ROWS:
                return "ragged", TensorMeta(name, shape, natural)
        spec = self.granularity(name, parameter) if callable(self.granularity) else self.granularity
        if isinstance(spec, (str, int)):
            return "ragged", TensorMeta(name, shape, granularity_of(spec, shape))
        row = TensorMeta(name, shape).row
        return "ragged", TensorMeta(name, shape, blocks=tuple(int(rows) * row for rows in spec))


def natural_units(module: nn.Module, *, root: bool) -> dict[int, int]:
    """What is best kept together of every parameter, by identity.

    :data:`WHOLE` for a matrix that an optimizer wants whole, and for vectors; the elements of one matrix for
    a stack of them; :data:`ROWS` for embeddings and output heads, which are large and need no matrix
    optimizer, and for frozen weights, which need none at all.

    Args:
        module: not sharded yet.
        root: whether it has the model's output head; a block alone has not, whatever its last layer is like.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    units: dict[int, int] = {}
    for item in classify(module):
        slices, rows, columns = item.view
        if item.role == "matrix" and slices > 1:
            units[id(item.parameter)] = rows * columns
        elif item.role == "embedding" and (root or id(item.parameter) in embeddings):
            units[id(item.parameter)] = ROWS
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.ndim > 1:
            units[id(parameter)] = ROWS
    return units


def from_plan(plan: Plan, names: dict[str, str], parameters: dict[str, nn.Parameter]) -> list[Placed]:
    """The plan's groups for ``parameters``; ``names`` maps their names to those in the plan.

    Raises:
        LayoutError: if the plan lacks one, has another shape for it, groups it with parameters of another
            unit, or groups trainable with frozen ones or unlike dtypes.
    """
    found: dict[int, dict[int, str]] = {}
    for name, parameter in parameters.items():
        group, layout, index = plan.find(names[name])
        if layout.tensors[index].shape != tuple(parameter.shape):
            raise LayoutError(
                f"{names[name]} has shape {tuple(parameter.shape)}, in the plan {layout.tensors[index].shape}"
            )
        found.setdefault(group, {})[index] = name
    placed = []
    for group, members in sorted(found.items()):
        layout = plan.groups[group]
        missing = [meta.name for i, meta in enumerate(layout.tensors) if i not in members]
        if missing:
            raise LayoutError(
                f"the plan gathers {names[next(iter(members.values()))]} together with {missing[0]}, which is"
                f" not in the same unit: plan one group a wrapped module"
            )
        ordered = [members[i] for i in range(len(layout.tensors))]
        kinds = {(parameters[name].requires_grad, parameters[name].dtype) for name in ordered}
        if len(kinds) > 1:
            raise LayoutError(
                f"the plan's group of {names[ordered[0]]} mixes trainable and frozen tensors, or dtypes:"
                f" plan them as separate groups"
            )
        placed.append(Placed(layout, ordered))
    return placed


def spread_owners(metas: Sequence[TensorMeta], loads: list[float]) -> list[int]:
    """An owner for every tensor of one group: longest processing time first, within the group.

    The largest tensor goes to the rank with the least of *this* group, so that no rank has to send most of a
    layer; ``loads`` (elements a rank has from earlier groups) breaks ties and is brought up to date. Vectors
    and scalars stay together, on the rank with the least of all.

    Returns:
        The rank of each tensor.
    """
    here = [0.0] * len(loads)
    owners = [0] * len(metas)

    def give(rank: int, indices: list[int]) -> None:
        size = sum(metas[i].numel for i in indices)
        here[rank] += size
        loads[rank] += size
        for i in indices:
            owners[i] = rank

    everyone = range(len(loads))
    matrices = [i for i, meta in enumerate(metas) if len(meta.shape) >= 2]
    for index in sorted(matrices, key=lambda i: (-metas[i].numel, i)):
        give(min(everyone, key=lambda r: (here[r], loads[r], r)), [index])
    tail = [i for i, meta in enumerate(metas) if len(meta.shape) < 2]
    if tail:
        give(min(everyone, key=lambda r: (loads[r], here[r], r)), tail)
    return owners
