"""Streaming: a model in fragments that are exchanged in turn, so that no round carries all of it (Streaming
DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

from collections.abc import Sequence


def split(sizes: Sequence[int], parts: int) -> list[range]:
    """Cut a sequence into runs of neighbours whose largest sum is as small as it can be.

    Args:
        sizes: bytes of each unit, in the order of the model; at least ``parts`` of them.
        parts: number of runs, at least 1.

    Returns:
        ``parts`` ranges of indices, none empty, one after the other; the same for the same arguments.

    Raises:
        ValueError: if there are fewer units than parts.
    """
    if not 1 <= parts <= len(sizes):
        raise ValueError(
            f"a model with {len(sizes)} buckets cannot be cut in {parts} fragments: "
            f"use between 1 and {len(sizes)}"
        )
    low, high = max(sizes), sum(sizes)
    while low < high:  # the smallest capacity with which the greedy cut needs no more than ``parts`` runs
        middle = (low + high) // 2
        if len(_fill(sizes, middle, 1)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _fill(sizes, low, parts)


def _fill(sizes: Sequence[int], capacity: int, least: int) -> list[range]:
    """Runs that are as long as ``capacity`` allows, but leave enough units for ``least`` runs in all."""
    runs: list[range] = []
    begin = held = 0
    for index, size in enumerate(sizes):
        if index > begin and (held + size > capacity or len(sizes) - index < least - len(runs)):
            runs.append(range(begin, index))
            begin, held = index, 0
        held += size
    return [*runs, range(begin, len(sizes))]
