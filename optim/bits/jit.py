"""How the numba kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numba.extending

Function = Callable[..., Any]


def kernel(signature: str | list[Any]) -> Callable[[Function], Function]:
    """Compile at once for ``signature`` (or several), without the GIL, cached on disk where that can be.

    Without ``fastmath``, LLVM contracts no multiplication and addition into one rounding. ``parallel=True``
    is never used: its thread layers abort the process on calls from two threads, or kill a forked child.
    """

    def compile_function(function: Function) -> Function:
        try:
            compiled: Function = numba.njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):  # numba found no directory that it may write its cache to
            compiled = numba.njit(signature, nogil=True)(function)
        return compiled

    return compile_function


def intrinsic(function: Function) -> Any:
    """``numba.extending.intrinsic``, typed: a function that emits LLVM IR."""
    return numba.extending.intrinsic(function)
