"""What both ends of a measurement send."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from protos.wire import CHUNK, encode_frame

MEASURE_BYTES: Final = 8 << 20  # of the bodies of one direction
MEASURE_SECONDS: Final = 1.5  # of one direction
_LEAST, _MOST = 4 << 10, 64 << 10


def chunks(nbytes: int = MEASURE_BYTES) -> Iterator[bytes]:
    """CHUNK frames with ``nbytes`` in all.

    Small ones come first, as a thin link has to carry several in a moment, and large ones then, as on a fast
    link every message costs time. They are random: what can be compressed looks faster than it is.
    """
    data, offset = os.urandom(_MOST), 0
    while offset < nbytes:
        size = min(_MOST, max(_LEAST, offset), nbytes - offset)
        yield encode_frame(CHUNK, memoryview(data)[:size], offset=offset)
        offset += size
