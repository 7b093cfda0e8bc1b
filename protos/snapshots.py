"""How a shared state is cut into chunks: what donors, coordinator and joiners agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protos.wire import CHUNK_BYTES

MAX_CHUNKS: Final = 4096  # of a snapshot: a manifest names each with 16 bytes


def chunk_bytes(nbytes: int) -> int:
    """Bytes of a chunk, but for the last, of a state of ``nbytes``: whole frames of 1 MiB, and no more than
    :data:`MAX_CHUNKS` of them.

    Raises:
        ValueError: a state has no negative size.
    """
    if nbytes < 0:
        raise ValueError(f"a state has 0 bytes at least, not {nbytes}")
    return CHUNK_BYTES * max(1, -(-nbytes // (CHUNK_BYTES * MAX_CHUNKS)))


def chunks(nbytes: int) -> int:
    """How many chunks a state of ``nbytes`` has."""
    return -(-nbytes // chunk_bytes(nbytes))


def chunk_range(nbytes: int, first: int, count: int) -> tuple[int, int]:
    """First byte, and one past the last, of ``count`` chunks from ``first`` on."""
    size = chunk_bytes(nbytes)
    return first * size, min(nbytes, (first + count) * size)


def shares(nbytes: int, donors: Sequence[str]) -> list[tuple[str, int, int]]:
    """Divide a state between ``donors``: (donor, first chunk, chunks), as equal as whole chunks allow.

    Donors for whom nothing is left are not in the list.
    """
    total, place, parts = chunks(nbytes), 0, []
    for index, donor in enumerate(donors):
        count = total // len(donors) + (index < total % len(donors))
        if count:
            parts.append((donor, place, count))
        place += count
    return parts
