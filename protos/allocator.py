"""A setting of the C library's allocator that bulk transfers of megabyte messages need.

glibc hands every freed block above a threshold back to the kernel at once, so each message of a stream is
mapped, zeroed page by page and unmapped again. `python -m bench round` shows the price: with
`MALLOC_TRIM_THRESHOLD_=131072`, glibc's own setting, a round takes a quarter longer on two cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MMAP_BYTES: Final = 32 << 20  # the most that glibc accepts
_TRIM_BYTES: Final = 128 << 20  # freed memory that stays with the process
_SETTINGS: Final = (
    ("MALLOC_MMAP_THRESHOLD_", _M_MMAP_THRESHOLD, _MMAP_BYTES),
    ("MALLOC_TRIM_THRESHOLD_", _M_TRIM_THRESHOLD, _TRIM_BYTES),
)


def keep_freed_memory() -> bool:
    """Let this process keep up to 128 MiB that it has freed, for its next messages.

    Returns ``True`` if the allocator took the settings. Does nothing outside Linux, with another C library,
    or where the user has set ``MALLOC_TRIM_THRESHOLD_`` or ``MALLOC_MMAP_THRESHOLD_``.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name, _, _ in _SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return all([mallopt(parameter, value) == 1 for _, parameter, value in _SETTINGS])
