"""A trainable tensor, its role, and how it is treated. Imports no torch: shapes lay a run out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["matrix", "embedding", "vector"]


class RoleError(ValueError):
    """A parameter or an override that cannot be given a role; the text names it."""


@dataclass(frozen=True, eq=False)
class ParameterRole:
    """One trainable tensor and how it is treated.

    Attributes:
        name: first name in ``model.named_parameters()``.
        parameter: the tensor itself.
        role: ``matrix``, ``embedding`` or ``vector``.
        view: ``(slices, rows, columns)`` with the parameter's elements in memory order; each slice is one
            matrix for the polar factor. ``(1, 1, elements)`` for a vector.
        fan_in: inputs of one output, in the logical orientation of the layer (``c_in * kh * kw`` for a
            convolution).
        position: in ``model.named_parameters()``; a backward pass makes gradients in about the reverse order.
    """

    name: str
    parameter: Tensor
    role: Role
    view: tuple[int, int, int]
    fan_in: int
    position: int = 0

    @property
    def held(self) -> bool:
        """Whether the parameter is here; one without storage (on the meta device) is held by another rank of
        this node's island."""
        return not self.parameter.is_meta

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.parameter.shape)


class Shape(NamedTuple):
    """Stands for a tensor of which only the shape is known, as a tensor on the meta device would."""

    shape: tuple[int, ...]
    is_meta: bool = True

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def role_of_shape(name: str, role: Role, shape: tuple[int, ...], position: int) -> ParameterRole:
    """The role of a tensor that is held elsewhere, seen as one matrix where it is one."""
    if role == "matrix":
        view, fan_in = (1, shape[0], prod(shape[1:])), prod(shape[1:])
    else:
        view, fan_in = (1, 1, prod(shape)), 1
    return ParameterRole(name, cast("Tensor", Shape(shape)), role, view, fan_in, position)


def by_role(roles: tuple[ParameterRole, ...], role: Role) -> Iterator[ParameterRole]:
    """The members of ``roles`` that have ``role``."""
    return (item for item in roles if item.role == role)


def held(roles: Iterable[ParameterRole], bucket: str = "") -> tuple[ParameterRole, ...]:
    """The members of ``roles`` that are held here.

    Raises ``ValueError`` if they travel together as ``bucket`` and only some are.
    """
    every = tuple(roles)
    found = tuple(item for item in every if item.held)
    if bucket and found and len(found) < len(every):
        missing = next(item.name for item in every if not item.held)
        raise ValueError(
            f"bucket {bucket!r} is held in parts: {found[0].name} is here, {missing} is not; give all of it "
            "to one rank"
        )
    return found
