"""One-bit sign votes: packing, counting the majority, unpacking, and the step against the voted signs.

Three implementations give the same bits: numba kernels (:mod:`~optim.bits.fast`) and numpy
(:mod:`~optim.bits.plain`) for CPU memory, torch operations (:mod:`~optim.bits.device`) for other devices;
:mod:`~optim.bits.reference` is the definition that the tests hold them to. ``tally`` and ``Tally`` need
numpy only: torch is imported with the first use of ``pack``, ``unpack`` or ``apply_``, so that a
coordinator starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from optim.bits.backends import backend
from optim.bits.layout import LINE, packed_nbytes, splitmix64, zero_seed
from optim.bits.votes import Tally, tally

if TYPE_CHECKING:
    from optim.bits.signs import apply_, pack, unpack

__all__ = [
    "LINE",
    "Tally",
    "apply_",
    "backend",
    "pack",
    "packed_nbytes",
    "splitmix64",
    "tally",
    "unpack",
    "zero_seed",
]


def __getattr__(name: str) -> Any:
    if name in ("apply_", "pack", "unpack"):
        from optim.bits import signs

        for function in ("apply_", "pack", "unpack"):
            globals()[function] = getattr(signs, function)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
