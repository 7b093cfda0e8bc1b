"""Which samples of a lease are read when, and by which rank of a node."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """Samples that are read in one pass forward and backward.

    Attributes:
        start: first global sample index.
        samples: how many.
        share: weight of their mean in that of the micro-batch; 0 for a pass that a rank makes only because
            the others do.
    """

    start: int
    samples: int
    share: float


def micro_batches(start: int, count: int, steps: int) -> tuple[tuple[int, int], ...]:
    """Cut the samples ``start`` to ``start + count - 1`` into ``steps`` batches ``(first, samples)``.

    As ``torch.tensor_split``: consecutive, the first ones larger by one. With fewer samples than steps there
    are fewer batches, of one sample each.
    """
    parts = min(count, steps)
    batches = []
    for index in range(parts):
        size = count // parts + (index < count % parts)
        batches.append((start, size))
        start += size
    return tuple(batches)


def parts_of(
    start: int, count: int, *, rank: int = 0, ranks: int = 1, accumulate: int = 1
) -> tuple[Part, ...]:
    """What a rank reads of a micro-batch, pass by pass.

    The ranks read disjoint parts, each in at most ``accumulate`` passes, and all make equally many passes.
    The shares of all parts of all ranks add up to 1.
    """
    pieces = micro_batches(start, count, ranks)
    passes = min(accumulate, pieces[0][1])
    own = micro_batches(*pieces[rank], passes) if rank < len(pieces) else ()
    parts = [Part(first, samples, samples / count) for first, samples in own]
    return (*parts, *[Part(start, 1, 0.0)] * (passes - len(parts)))
