"""Which backend works on CPU memory: numba kernels where they can be had, numpy otherwise."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from optim.bits.layout import Bytes, Rows

VARIABLE = "ATOLL_BITS"

_MODULES = {"numba": "optim.bits.fast", "numpy": "optim.bits.plain"}
_lock = threading.Lock()
_chosen: Backend | None = None
_log = logging.getLogger(__name__)


class Counters(Protocol):
    """Bit-sliced counters of one backend, for a streaming tally."""

    def add(self, votes: Rows, weights: Sequence[int] | None) -> None:
        """Add rows to the counters."""

    def finish(self, total: int, cast: Bytes, out: Bytes) -> None:
        """Write the majority of ``total`` votes, ties as in ``cast``."""

    def reset(self) -> None:
        """Set all counters to zero."""


class Backend(Protocol):
    """The functions that a backend module has; :mod:`optim.bits.plain` documents them."""

    NAME: str

    def pack(self, patterns: NDArray[Any], infinity: int, seed: int, out: Bytes) -> bool:
        """Pack bit patterns; True if all are finite."""

    def unpack(self, bits: Bytes, out: NDArray[Any], plus: int, minus: int) -> None:
        """Write one of two patterns for every bit."""

    def apply_(self, w: NDArray[np.float32], bits: Bytes, step: np.float32, decay: np.float32) -> None:
        """Decay the weights, then move them against the signs."""

    def tally(self, votes: Rows, weights: Sequence[int] | None, casting: int, out: Bytes) -> None:
        """Weighted majority of rows."""

    def Counters(self, nbytes: int, planes: int) -> Counters:
        """Empty counters for rows of ``nbytes``."""


def load(name: str) -> Backend:
    """Import the backend ``"numba"`` or ``"numpy"``; raises what its import raises."""
    return cast(Backend, importlib.import_module(_MODULES[name]))


def _choose(wanted: str | None) -> Backend:
    if wanted:
        if wanted not in _MODULES:
            raise ValueError(f"{VARIABLE}={wanted!r}: it must be 'numba' or 'numpy', or not be set")
        try:
            return load(wanted)
        except Exception as error:
            raise RuntimeError(
                f"{VARIABLE}={wanted} asks for a backend that cannot be loaded: {error}. "
                "Install the extra 'fast' (numba), or unset the variable."
            ) from error
    try:
        return load("numba")
    except ImportError as error:
        _log.info("sign votes use numpy, since numba cannot be imported (%s); the extra 'fast' has it", error)
    except Exception:  # a compiler that fails on this machine costs speed, not the run
        _log.warning("sign votes use numpy, since the numba kernels cannot be compiled", exc_info=True)
    return load("numpy")


def current() -> Backend:
    """The backend of this process, chosen on the first call.

    Raises ``ValueError`` or ``RuntimeError`` if the environment variable ``ATOLL_BITS`` names a backend that
    does not exist or cannot be loaded.
    """
    global _chosen
    if _chosen is None:
        with _lock:
            if _chosen is None:
                _chosen = _choose(os.environ.get(VARIABLE))
    return _chosen


def backend() -> str:
    """Name of the backend for CPU memory: ``"numba"`` or ``"numpy"``.

    ``ATOLL_BITS=numpy`` or ``ATOLL_BITS=numba`` in the environment forces it. All backends give the same
    bits. The first call imports numba and compiles its kernels, or takes them from numba's cache.
    """
    return current().NAME
