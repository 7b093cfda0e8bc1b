"""The majority of packed votes: all at once, or as they arrive.

All arithmetic is on integers, so a result depends neither on the order of the votes nor on the backend.
Calls release the GIL while they count (with numba) and share no state: call them from as many threads as
there are chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optim.bits.backends import current
from optim.bits.layout import LINE_BYTES, MAX_TOTAL_WEIGHT, MAX_WEIGHT, Bytes, Rows

_UINT8 = np.dtype(np.uint8)


def _check_row(row: object, nbytes: int, name: str) -> Bytes:
    """``row`` as a plain contiguous uint8 array of ``nbytes``; raises ``TypeError`` or ``ValueError``."""
    if type(row) is not np.ndarray:
        if not isinstance(row, np.ndarray):
            raise TypeError(f"{name} is a {type(row).__name__}, not a numpy array of uint8")
        row = row.view(np.ndarray)  # numpy.memmap and the like
    if row.dtype != _UINT8 or row.ndim != 1 or not row.flags.c_contiguous:
        raise TypeError(
            f"{name} must be a contiguous one-dimensional uint8 array, "
            f"not {row.dtype} of shape {row.shape} with strides {row.strides}"
        )
    if row.size != nbytes:
        raise ValueError(f"{name} has {row.size} bytes where {nbytes} are expected")
    return row


def _check_votes(
    votes: Rows, weights: Sequence[int] | None, nbytes: int | None
) -> tuple[Rows, list[int] | None, int]:
    """Votes as plain arrays, weights as ints (``None`` if all are 1), bytes of a vote."""
    count = len(votes)
    if count == 0:
        raise ValueError("a tally needs at least one vote")
    if nbytes is None:
        first = votes[0]
        nbytes = first.size if isinstance(first, np.ndarray) else 0
    rows: Rows
    if isinstance(votes, np.ndarray):
        if votes.ndim != 2:
            raise TypeError(
                f"votes must be a sequence of rows or a two-dimensional array, not shape {votes.shape}"
            )
        _check_row(votes[0], nbytes, "votes[0]")
        rows = votes.view(np.ndarray)
    else:
        rows = [_check_row(vote, nbytes, f"votes[{i}]") for i, vote in enumerate(votes)]
    if nbytes == 0 or nbytes % LINE_BYTES:
        raise ValueError(f"a vote has {nbytes} bytes: it must be a positive multiple of {LINE_BYTES}")
    if weights is None:
        return rows, None, nbytes
    if len(weights) != count:
        raise ValueError(f"{len(weights)} weights for {count} votes")
    checked = [_check_weight(weight) for weight in weights]
    return rows, None if max(checked) == 1 else checked, nbytes


def _check_weight(weight: int) -> int:
    if isinstance(weight, (bool, np.bool_)) or not isinstance(weight, (int, np.integer)):
        raise TypeError(f"weight {weight!r} must be an integer")
    if not 1 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight {weight} must be from 1 to {MAX_WEIGHT}; leave out votes that do not count")
    return int(weight)


def _check_out(out: Bytes | None, nbytes: int) -> Bytes:
    if out is None:
        return np.empty(nbytes, np.uint8)
    _check_row(out, nbytes, "out")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    return out


def tally(
    votes: Rows,
    weights: Sequence[int] | None = None,
    *,
    casting: int,
    out: Bytes | None = None,
) -> Bytes:
    """Weighted majority of packed votes, bit by bit (signSGD with majority vote, arXiv 1810.05291).

    ``votes``: M uint8 arrays of one length, a multiple of 64 bytes at any address, or one array
    ``uint8[M, nbytes]`` with contiguous rows. ``weights``: M integers from 1 to 65535; all 1 if None. A bit
    of the result is 1 where the weighted sum of the votes as +-1 is above zero; where it is zero, the result
    has the bit of ``votes[casting]``. Pad bits that are 0 in every vote stay 0.

    Writes into ``out`` (uint8[nbytes], not overlapping the votes) if given; returns the result. Raises
    ``TypeError`` for arrays of another kind, ``ValueError`` for other lengths, weights or indices.
    """
    rows, checked, nbytes = _check_votes(votes, weights, None)
    if not 0 <= casting < len(rows):
        raise ValueError(f"casting vote {casting} is not one of the {len(rows)} votes")
    total = len(rows) if checked is None else sum(checked)
    if total > MAX_TOTAL_WEIGHT:
        raise ValueError(f"the weights sum to {total}, more than {MAX_TOTAL_WEIGHT}")
    result = _check_out(out, nbytes)
    current().tally(rows, checked, int(casting), result)
    return result


class Tally:
    """The majority of votes that arrive one by one or in groups, without keeping them.

    Takes ``bit_length(max_weight) * nbytes`` bytes whatever the number of votes, and gives exactly what
    :func:`tally` gives for the same votes. Groups of 8 or 16 are two to five times cheaper than single
    votes. One instance must not be used from two threads at once.
    """

    def __init__(self, nbytes: int, max_weight: int) -> None:
        """For votes of ``nbytes``, a positive multiple of 64, and total weight up to ``max_weight``.

        Raises ``ValueError`` for other sizes and for a weight outside 1 to 2^31 - 1.
        """
        if nbytes <= 0 or nbytes % LINE_BYTES:
            raise ValueError(f"a vote has {nbytes} bytes: it must be a positive multiple of {LINE_BYTES}")
        if not 1 <= max_weight <= MAX_TOTAL_WEIGHT:
            raise ValueError(f"max_weight {max_weight} must be from 1 to {MAX_TOTAL_WEIGHT}")
        self.nbytes, self.max_weight = nbytes, max_weight
        self._total = 0
        self._counters = current().Counters(nbytes, max_weight.bit_length())

    @property
    def total_weight(self) -> int:
        """Sum of the weights of the votes added so far."""
        return self._total

    def add(self, vote: Bytes, weight: int = 1) -> None:
        """Add one vote, uint8[nbytes]. Raises as :meth:`add_group` does."""
        self.add_group([vote], [weight])

    def add_group(self, votes: Rows, weights: Sequence[int] | None = None) -> None:
        """Add several votes at once; they are not referred to after the call.

        Raises ``TypeError`` or ``ValueError`` for votes or weights that :func:`tally` would refuse, and
        ``ValueError`` if the total weight would exceed ``max_weight``; nothing is added then.
        """
        rows, checked, _ = _check_votes(votes, weights, self.nbytes)
        total = self._total + (len(rows) if checked is None else sum(checked))
        if total > self.max_weight:
            raise ValueError(
                f"the votes' total weight would be {total}, more than max_weight {self.max_weight}"
            )
        self._counters.add(rows, checked)
        self._total = total

    def finish(self, casting_vote: Bytes, out: Bytes | None = None) -> Bytes:
        """The majority of the votes so far; a tie takes the bit of ``casting_vote``, uint8[nbytes].

        The counters stay as they are: more votes may follow. Raises ``ValueError`` before the first vote.
        """
        if self._total == 0:
            raise ValueError("no vote was added to this tally")
        cast = _check_row(casting_vote, self.nbytes, "casting_vote")
        result = _check_out(out, self.nbytes)
        self._counters.finish(self._total, cast, result)
        return result

    def reset(self) -> None:
        """Forget all votes; the memory is kept."""
        self._counters.reset()
        self._total = 0
