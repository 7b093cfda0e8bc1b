"""What the votes of a round tell about those who cast them, from a sample of their bits.

Honest nodes vote on noisy gradients of the same loss, so their bits agree in pairs more often than coins
would, all pairs about equally. That share is measured in every round and is the yardstick of the same round:
it falls as training goes on and rises with the batch, and no constant would do. A node whose bits agree with
most others no more often than a coin's tells nothing; one that agrees less often votes against them.

Nothing here knows of rounds before, of networks or of clocks, but for :class:`Former`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optim.aggregate import Bytes
from protos.buckets import BucketTable

Words = NDArray[np.uint64]  # [voters, words], the sampled 64-bit words of every vote

WORDS: Final = 256  # sampled of a vote: 16384 bits, whose share of ones has a standard error of 0.4 %
BUDGET: Final = 16384  # words of all voters together: with more than 64 of them fewer of each
FORMER_ROWS: Final = 512  # votes of former rounds that are kept, 2 KiB each: 64 rounds of 8 nodes
LEAST_VOTERS: Final = 3  # two who differ: nobody can tell which of them is wrong
LEAST_WORDS: Final = 8  # that differ between voters; with fewer nothing is called a copy
COMPARED_WORDS: Final = 64  # to find copies
COPIED: Final = 0.5  # share of equal words; of honest votes that agree in 95 % of the bits it is 4 %
CONSTANT: Final = 0.05  # share of the rarer bit


class Sampler:
    """Draws the same places in every round, which nobody else knows.

    Args:
        secret: whoever knows it could cast a vote that is honest only where it is looked at.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._places: dict[str, NDArray[np.int64]] = {}

    def take(self, table: BucketTable, rows: Sequence[Bytes]) -> Words | None:
        """The sampled words of votes laid out by ``table``; ``None`` if it holds next to no votes.

        Args:
            rows: uint8[table.nbytes], contiguous; at least one.
        """
        places = self._places.get(table.digest)
        if places is None:
            places = self._places[table.digest] = self._drawn(table)
        places = places[: max(LEAST_WORDS, min(WORDS, BUDGET // len(rows)))]
        if len(places) < LEAST_WORDS:
            return None
        words: Words = np.stack([row[: len(row) // 8 * 8].view("<u8")[places] for row in rows])
        return words

    def _drawn(self, table: BucketTable) -> NDArray[np.int64]:
        """Words without padding of what is voted on, in random order."""
        first, counts = [], []
        for bucket, offset in zip(table.buckets, table.offsets, strict=True):
            if bucket.reduce == "majority" and bucket.elements >= 64:
                first.append(offset // 8)
                counts.append(bucket.elements // 64)
        if not counts:
            return np.empty(0, np.int64)
        ends = np.cumsum(counts)
        seed = hashlib.sha256(self._secret + table.digest.encode()).digest()
        rng = np.random.default_rng(np.frombuffer(seed, np.uint32))
        drawn = rng.permutation(np.unique(rng.integers(0, ends[-1], 2 * WORDS)))[:WORDS]
        bucket_of = np.searchsorted(ends, drawn, side="right")
        starts = ends - np.asarray(counts)
        places: NDArray[np.int64] = np.asarray(first, np.int64)[bucket_of] + drawn - starts[bucket_of]
        return places


@dataclass(frozen=True)
class Ballot:
    """What one voter's bits in one round tell.

    Attributes:
        gap: how much less than those of a typical voter they agree with the others'; NaN: not known.
        typical: how much more than a coin's those of a typical voter do. A coin falls short by just that,
            and who votes the opposite by twice as much.
        noise: standard error of both.
        constant: nearly all of them are the same, and those of most others are not.
        copied: they are those of this voter, which came before.
        replayed: they are those of a round before.
    """

    gap: float = math.nan
    typical: float = math.nan
    noise: float = math.nan
    constant: bool = False
    copied: int | None = None
    replayed: bool = False


UNKNOWN: Final = Ballot()


class Former:
    """Sampled votes of former rounds: the last :data:`FORMER_ROWS`."""

    def __init__(self) -> None:
        self._rows: Words = np.zeros((FORMER_ROWS, WORDS), np.uint64)
        self._widths = [0] * FORMER_ROWS
        self._tables = [""] * FORMER_ROWS
        self._next = 0

    def holds(self, table: str, words: Words, where: NDArray[np.int64]) -> list[bool]:
        """Whether each of ``words`` is one of them, at the places ``where``."""
        known = [
            index
            for index, (name, width) in enumerate(zip(self._tables, self._widths, strict=True))
            if name == table and width >= words.shape[1]
        ]
        rows, least = self._rows[known][:, where], COPIED * len(where)
        return [bool((np.count_nonzero(rows == vote, axis=1) >= least).any()) for vote in words[:, where]]

    def keep(self, table: str, words: Words) -> None:
        """Remember the votes of a round."""
        for vote in words[-FORMER_ROWS:]:
            self._rows[self._next, : len(vote)] = vote
            self._widths[self._next], self._tables[self._next] = len(vote), table
            self._next = (self._next + 1) % FORMER_ROWS


def judge_words(words: Words, arrival: Sequence[int], former: Former, table: str) -> list[Ballot]:
    """What a sample of all votes of a round tells; ``former`` then holds them too.

    Args:
        words: of every voter.
        arrival: of every voter, a number that is higher for those who came later: of two equal votes the
            later one is the copy.
        former: votes of the rounds before.
        table: digest of what they are laid out by.
    """
    voters = len(words)
    if voters < LEAST_VOTERS:
        former.keep(table, words)
        return [UNKNOWN] * voters
    ones = np.bitwise_count(words).sum(axis=1) / (64 * words.shape[1])
    constant = (ones < CONSTANT) | (ones > 1.0 - CONSTANT)
    # Where nobody has a gradient all cast the same hash bits: words that most share prove nothing.
    middle = np.sort(words, axis=0)[voters // 2]
    where = np.flatnonzero(np.count_nonzero(words == middle, axis=0) * 2 <= voters)[:COMPARED_WORDS]
    copied: list[int | None] = [None] * voters
    replayed = [False] * voters
    if len(where) >= LEAST_WORDS:
        copied = _copies(words[:, where], arrival)
        replayed = former.holds(table, words, where)
    former.keep(table, words)
    own = [index for index in range(voters) if copied[index] is None]
    ties = affinities(correlations(words), own)
    typical, noise = float(np.median(ties)), 1.0 / math.sqrt(64 * words.shape[1])
    # Where nearly all weights have to move one way, as to undo a drift, honest votes are flat and agree.
    # Whole words of theirs are the same then as well, in every round: those are no copies.
    alone = 2.0 * ties < typical
    return [
        Ballot(
            typical - float(tie),
            typical,
            noise,
            constant=bool(flat and odd),
            copied=None if flat else copy,
            replayed=seen and not flat,
        )
        for tie, flat, odd, copy, seen in zip(ties, constant, alone, copied, replayed, strict=True)
    ]


def judge_agreement(agreement: Sequence[float], weights: Sequence[int]) -> list[Ballot]:
    """The same from nothing but each voter's share of bits that equal the result, where nobody sees votes.

    A voter has helped to make the result, so that of fair coins too more than half the bits equal it; a coin
    among others falls short by at least what these have above that.
    """
    total = sum(weights)
    edges = [2.0 * share - 1.0 for share in agreement]
    if len(edges) < LEAST_VOTERS or not np.isfinite(edges).all():
        return [UNKNOWN] * len(edges)
    # E|sum(w s)| / sum(w) of fair coins s, which is the mean of their edges
    chance = math.sqrt(2.0 / math.pi * sum(weight**2 for weight in weights)) / total
    typical, noise = float(np.median(edges)), 1.0 / math.sqrt(64 * WORDS)
    return [Ballot(typical - edge, typical - chance, noise) for edge in edges]


def correlations(words: Words) -> NDArray[np.float64]:
    """``[voters, voters]``: the share of equal bits of each pair less that of unequal ones."""
    bits = 64 * words.shape[1]
    differing = np.stack([np.bitwise_count(words ^ vote).sum(axis=1) for vote in words])
    shares: NDArray[np.float64] = 1.0 - 2.0 * differing / bits
    return shares


def affinities(pairs: NDArray[np.float64], own: Sequence[int]) -> NDArray[np.float64]:
    """How much each voter agrees with about half of the others: the (n // 2)-th largest of its correlations.

    Fewer than half of n voters can raise that only for votes that agree with honest ones: so many of any
    honest voter's partners are honest, and those in league with another are too few.

    Args:
        pairs: of :func:`correlations`.
        own: the voters whose votes are no copies; only these are partners.
    """
    found = np.empty(len(pairs))
    for index, row in enumerate(pairs):
        partners = np.sort(row[[other for other in own if other != index]])[::-1]
        rank = max(1, (len(partners) + 1) // 2)
        found[index] = partners[rank - 1] if len(partners) else 0.0
    return found


def _copies(words: Words, arrival: Sequence[int]) -> list[int | None]:
    """Of each vote the first one that it equals and that came before it."""
    order = sorted(range(len(words)), key=lambda index: arrival[index])
    found: list[int | None] = [None] * len(words)
    for place, index in enumerate(order[1:], 1):
        before = order[:place]
        equal = np.count_nonzero(words[before] == words[index], axis=1)
        same = np.flatnonzero(equal >= COPIED * words.shape[1])
        if len(same):
            found[index] = before[int(same[0])]
    return found
