"""What a user chooses for units beside the placement: dtypes, and how far to run ahead."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit, as in ``torch.distributed.fsdp``. None leaves things as they are.

    Attributes:
        param_dtype: of gathered weights, hence of forward, backward and unsharded gradients. The resident
            segment (the master weights) and the optimizer keep the dtype that the parameters have.
        reduce_dtype: of gradients while they are added up, over micro-batches and ranks; ``param_dtype``
            otherwise.
        output_dtype: floating-point outputs of the unit's forward are cast to it.
        cast_forward_inputs: floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class Schedule:
    """How far the runtime runs ahead.

    In backward the defaults hold no more than FSDP2 does: the weights that come next share their place with
    the gradients that go. While as many reduces are on their way as may be, a gather begins with the running
    unit's first gradient, and gets its memory when a third of them have come and the reduce is over.

    Attributes:
        prefetch: units that are gathered before the running one is done; 0 gathers on demand.
        reduces_in_flight: units whose gradients may be on their way at once, at least 1. With more, gathers
            do not wait for a reduce, at the price of the memory of both.
        find_unused_parameters: leave the gradients of parameters that no rank used at None, as one process
            would, at the price of a small collective a step; otherwise they are zeros.
    """

    prefetch: int = 1
    reduces_in_flight: int = 1
    find_unused_parameters: bool = False
