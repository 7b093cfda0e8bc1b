"""What trains the parameters of a node between two exchanges.

An inner optimizer moves live parameters by their gradients. It knows neither rounds nor other nodes, unless
part of its state travels beside the pseudo-gradient (:meth:`Inner.buckets`), as the moments of LoRDO do.
Weight decay is not its business: it is applied once a round, to the parameters all nodes share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from optim.role import ParameterRole
from protos.buckets import Bucket

F32 = npt.NDArray[np.float32]


class Inner(Protocol):
    """The local optimizer of some of a model's parameters.

    Attributes:
        roles: the parameters it trains, in the order of their names. Those that are held by another rank of
            the island have buckets, and neither steps nor state here.
        bootstrap: whether round 0 makes no local step: the gradient itself is the contribution, and the
            result only sets up this optimizer's own state. Parameters stay as they are.
    """

    @property
    def roles(self) -> tuple[ParameterRole, ...]: ...

    @property
    def bootstrap(self) -> bool: ...

    def step(self, lr: float) -> None:
        """One local step on every parameter from its ``.grad``, which is finite; a missing gradient counts
        as zero. ``lr`` is that of the moment, after the schedule."""
        ...

    def buckets(self, role: ParameterRole) -> list[Bucket]:
        """What travels beside the role's pseudo-gradient, placed right behind its bucket in the table.

        Empty for optimizers whose state stays at home. The pseudo-gradient of a matrix is, unless it is voted
        on, a mean bucket with the role's name and shape, which a basis bucket may name as its source. Bucket
        and tensor names begin with ``optimizer/<name>/``.
        """
        ...

    def contribute(self, bucket: Bucket) -> F32:
        """Values of one of the mean buckets of :meth:`buckets`: fp32, ``bucket.shape``, on the host. Not
        called for basis buckets. Values that are not finite make the node abstain."""
        ...

    def take(self, role: ParameterRole, results: Mapping[str, F32], round_index: int) -> None:
        """Take over the results of :meth:`buckets` by bucket name, finite, fp32, ``bucket.shape``, on the
        host; called after the outer step, with the new shared value already in the parameter."""
        ...

    def shared_tensors(self) -> dict[str, Tensor]:
        """State that is bit-identical on all nodes between rounds, as ``optimizer/<name>/<key>``, live."""
        ...

    def local_tensors(self) -> dict[str, Tensor]:
        """State of this node alone, as ``optimizer/<name>/<key>``, live."""
        ...

    def prepare_load(self) -> None:
        """Make every tensor of :meth:`local_tensors` and :meth:`shared_tensors` exist, without any influence
        on the training of a node that loads nothing."""
        ...

    def loaded(self) -> None:
        """The tensors of :meth:`shared_tensors` were overwritten: continue from them."""
        ...

    def restart(self) -> None:
        """Replace local state that is not finite by its start values."""
        ...
