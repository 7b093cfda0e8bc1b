"""A kernel that does nothing but read: the ceiling of any kernel that has to see every byte once.

Compiled by numba on import; :mod:`bench.votes` imports it where that is the backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optim.bits.jit import kernel
from optim.bits.simd_tally import load, splat, store, total


@kernel("uint64(uint64[::1], intp)")
def read(rows: Any, nbytes: int) -> Any:
    """Xor of all 64-bit words of the rows at these addresses, each of ``nbytes``, a multiple of 64."""
    nothing = splat(np.uint64(0))
    a, b, c, d = nothing, nothing, nothing, nothing
    for m in range(rows.size):
        base = np.intp(rows[m])
        end = base + nbytes
        for p in range(base, end - 511, 512):
            a, b = total(a, load(p), load(p + 64)), total(b, load(p + 128), load(p + 192))
            c, d = total(c, load(p + 256), load(p + 320)), total(d, load(p + 384), load(p + 448))
        for p in range(end - nbytes % 512, end, 64):
            a = total(a, load(p), nothing)
    words = np.zeros(8, np.uint64)
    store(words.ctypes.data, total(total(a, b, c), d, nothing))
    return words[0] ^ words[1] ^ words[2] ^ words[3] ^ words[4] ^ words[5] ^ words[6] ^ words[7]
