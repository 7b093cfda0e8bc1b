"""What local optimizers have in common whose state never leaves the node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from optim.local.inner import F32
from optim.roles import ParameterRole, held
from protos.buckets import Bucket


class StandaloneInner(ABC):
    """An :class:`optim.local.inner.Inner` of which nothing travels.

    Args:
        roles: the parameters it trains.

    Attributes:
        held: those that are here, and not with another rank of the island.
        state: tensors by the name of the parameter, then by key; live.
    """

    bootstrap = False

    def __init__(self, roles: Sequence[ParameterRole]) -> None:
        self.roles = tuple(sorted(roles, key=lambda role: role.name))
        self.held = held(self.roles)
        self.state: dict[str, dict[str, Tensor]] = {}

    @abstractmethod
    def step(self, lr: float) -> None:
        """One local step on every held parameter."""

    def buckets(self, role: ParameterRole) -> list[Bucket]:
        """Nothing travels."""
        return []

    def contribute(self, bucket: Bucket) -> F32:
        """Never called; raises ``LookupError``."""
        raise LookupError(f"{type(self).__name__} has no bucket {bucket.name!r}: all its state is local")

    def take(self, role: ParameterRole, results: Mapping[str, F32], round_index: int) -> None:
        """Nothing comes back."""
        return None

    def shared_tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def local_tensors(self) -> dict[str, Tensor]:
        """All of :attr:`state`, as ``optimizer/<name>/<key>``."""
        return {
            f"optimizer/{name}/{key}": tensor
            for name, tensors in self.state.items()
            for key, tensor in tensors.items()
        }

    def prepare_load(self) -> None:
        """All tensors exist from the start."""
        return None

    def loaded(self) -> None:
        """Nothing is shared."""
        return None

    def restart(self) -> None:
        """Zero all state of parameters of which some is not finite."""
        for tensors in self.state.values():
            if not all_finite(tensors.values()):
                for tensor in tensors.values():
                    tensor.zero_()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no floating-point entry is NaN or infinite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def gradient_of(role: ParameterRole) -> Tensor:
    """The gradient of a parameter; zeros if there is none."""
    gradient = role.parameter.grad
    return torch.zeros_like(role.parameter) if gradient is None else gradient
