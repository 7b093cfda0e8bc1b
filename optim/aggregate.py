"""The reduction of a round from encoded contributions to an encoded result. NumPy only.

Majorities are integers. A mean is added in float64 in slot order at this one place and encoded once, so every
node receives the same bytes; what the encoding loses goes into the next result of the same bucket (two-sided
error feedback, as in DoubleSqueeze, arXiv 1905.05957). Bases are found from a bucket's mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from optim.bits import zero_seed
from optim.codecs import codec_of
from optim.lordo.basis import compute_basis
from optim.mean import F32, F64, clip_factors, mean_into, trimmed_mean, weighted_mean
from optim.pieces import Part
from optim.spans import byte_ranges, run_length, run_shape
from protos.buckets import Bucket, BucketTable, MeanRule
from protos.codecs import CodecSpec

Bytes = NDArray[np.uint8]

_LARGEST: Final = float(np.finfo(np.float32).max)
RUN_ELEMENTS: Final = 1 << 16  # decoded at a time where the codec allows it: they stay in a core's caches


class TallyFunction(Protocol):
    """``optim.bits.tally``: the weighted majority of each bit; a tie takes the bit of ``votes[casting]``."""

    def __call__(
        self,
        votes: Sequence[Bytes],
        weights: Sequence[int] | None = None,
        *,
        casting: int,
        out: Bytes | None = None,
    ) -> Bytes:
        """uint8 arrays of equal length, a multiple of 64."""
        ...


def casting_voter(round_index: int, voters: int) -> int:
    """Who of ``voters`` (in slot order) decides ties by its bit: it rotates, so ties are unbiased."""
    return round_index % voters if voters else 0


class ReducerMemory:
    """What a reducer carries from one round to the next: what encoded results lost, warm starts of encoders,
    and bases.

    It changes only by :meth:`commit`: attempts at a round that come to nothing leave no trace. A reducer
    that has lost it starts afresh: results stay valid, a round's quantisation error is then lost once.
    4 bytes for each element of a bucket with a lossy result. Arrays are never written to once they are in
    here, so a thread may read while another commits.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, F32] = {}

    def get(self, key: str, shape: tuple[int, ...]) -> F32 | None:
        """The array under ``key``; ``None`` if there is none of that shape."""
        array = self._arrays.get(key)
        return array if array is not None and array.shape == shape else None

    def commit(self, changes: Mapping[str, F32]) -> None:
        """Take over what a committed round leaves."""
        self._arrays = {**self._arrays, **changes}

    def arrays(self) -> dict[str, F32]:
        """Everything, for a checkpoint; not to be written to."""
        return dict(self._arrays)

    def load(self, arrays: Mapping[str, F32]) -> None:
        """Replace everything by what :meth:`arrays` gave."""
        self._arrays = {key: np.array(array, np.float32) for key, array in arrays.items()}


class Aggregation:
    """One attempt to reduce the contributions of a fixed set of voters.

    Parts may be reduced as soon as their bytes are there, but in the order of the table: a basis comes after
    its source. Not thread-safe.

    Args:
        table: layout of contributions and result.
        voters: how many there are, at least 1.
        round_index: decides who breaks ties, and what zeros are encoded as in signs.
        tally: the majority function.
        memory: read now, changed by :meth:`commit`.
        weights: of the votes, 1 to 65535; all 1 if ``None``.
        mean_weights: of the means; as the votes if ``None``.
    """

    def __init__(
        self,
        table: BucketTable,
        voters: int,
        *,
        round_index: int,
        tally: TallyFunction,
        memory: ReducerMemory,
        weights: Sequence[int] | None = None,
        mean_weights: Sequence[int] | None = None,
    ) -> None:
        votes = [1] * voters if weights is None else list(weights)
        self._table = table
        self._round = round_index
        self._tally = tally
        self._weights = None if all(weight == 1 for weight in votes) else votes
        self._mean_weights = reduced(votes if mean_weights is None else mean_weights)
        self._casting = casting_voter(round_index, voters)
        self._memory = memory
        self._changes: dict[str, F32] = {}
        bases = (bucket for bucket in table.buckets if bucket.reduce == "basis")
        self._sources = {bucket.source for bucket in bases}
        self._means: dict[str, F32] = {}  # of sources

    def reduce(self, part: Part, rows: Sequence[Bytes], out: Bytes) -> None:
        """Reduce one part.

        Args:
            part: of the table, see :func:`optim.pieces.parts_of`; whole buckets as they are, others may be
                chunks.
            rows: the part's bytes of every voter, in slot order, contiguous; nothing is read for a basis.
                Encodings must be without a :meth:`~optim.codecs.Codec.problem`.
            out: uint8[part.out_nbytes], contiguous; receives the part's bytes of the result.
        """
        if part.rule == "coded":
            self._mean(part, rows, out)
        elif part.rule == "basis":
            self._basis(part, out)
        elif part.rule == "mean":
            mean_into(rows, self._mean_weights, out)
        elif len(rows) == 1:
            out[:] = rows[0]
        else:
            self._tally(rows, self._weights, casting=self._casting, out=out)

    def commit(self) -> None:
        """The round is committed with this result: the memory moves on."""
        self._memory.commit(self._changes)

    # ------------------------------------------------------------------ means

    def _mean(self, part: Part, rows: Sequence[Bytes], out: Bytes) -> None:
        bucket = self._table.buckets[part.bucket]
        reader = _Reader(bucket, rows, self._table.rule)
        factors = reader.clip_factors() if self._table.rule.clip else None
        mean = np.empty(bucket.elements, np.float32) if bucket.name in self._sources else None
        writer = _Writer(bucket, self._memory, zero_seed(self._round, self._table.numbers[part.bucket]), out)
        for first, last in reader.runs():
            values = reader.mean(first, last, self._mean_weights, factors)
            if mean is not None:
                mean[first:last] = values
            writer.write(first, last, values)
        self._changes.update(writer.finish())
        if mean is not None:
            self._means[bucket.name] = mean.reshape(bucket.shape)

    def _basis(self, part: Part, out: Bytes) -> None:
        bucket = self._table.buckets[part.bucket]
        key = f"basis/{_key(bucket)}"
        previous = self._memory.get(key, bucket.shape)
        basis = compute_basis(self._means[bucket.source], bucket.shape[1], previous)
        used = 4 * bucket.elements
        out[:used] = basis.astype("<f4").reshape(-1).view(np.uint8)
        out[used:] = 0
        self._changes[key] = basis


class _Encodings:
    """Encodings of one tensor, decoded run by run where the codec allows it."""

    def __init__(self, codec: str, shape: tuple[int, ...], about: int) -> None:
        self._codec = codec
        self._shape = shape
        self._spec = CodecSpec.parse(codec)
        self._count = math.prod(shape)
        self._run = run_length(self._spec, shape, about)
        self._values = np.empty(self._run, np.float32)

    def runs(self) -> Iterator[tuple[int, int]]:
        """First and end element of what is decoded at a time."""
        for first in range(0, self._count, self._run):
            yield first, min(first + self._run, self._count)

    def decode(self, rows: Iterable[Bytes], first: int, last: int) -> Iterator[F32]:
        """A run of each of ``rows``, one after the other in the same memory."""
        codec = codec_of(self._codec, run_shape(self._spec, self._shape, first, last))
        ranges = byte_ranges(self._spec, self._shape, first, last)
        out = self._values[: last - first]
        for row in rows:
            pieces = [row[start:end] for start, end in ranges]
            codec.decode(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), out)
            yield out


class _Reader:
    """The voters' encodings of one mean bucket."""

    def __init__(self, bucket: Bucket, rows: Sequence[Bytes], rule: MeanRule) -> None:
        self._rows = rows
        self._rule = rule
        # A trimmed mean needs the values of all voters at once: 4 bytes each for the elements of a run.
        about = RUN_ELEMENTS // len(rows) if rule.trim else RUN_ELEMENTS
        self._encodings = _Encodings(bucket.codec, bucket.shape, about)
        self.runs = self._encodings.runs

    def clip_factors(self) -> list[float]:
        """What each voter's values are scaled with, from the norms of the whole bucket."""
        squares = np.zeros(len(self._rows))
        for first, last in self.runs():
            for index, values in enumerate(self._encodings.decode(self._rows, first, last)):
                squares[index] += np.square(values, dtype=np.float64).sum()
        return clip_factors(np.sqrt(squares).tolist(), self._rule.clip)

    def mean(self, first: int, last: int, weights: Sequence[int], factors: Sequence[float] | None) -> F64:
        """The mean of a run, fp64."""
        decoded = self._encodings.decode(self._rows, first, last)
        if not self._rule.trim:
            return weighted_mean(decoded, weights, factors)
        stack = np.empty((len(self._rows), last - first), np.float32)
        for row, values in zip(stack, decoded, strict=True):
            row[:] = values
        mean, step = np.empty(last - first), max(1, RUN_ELEMENTS // len(self._rows))
        for start in range(0, last - first, step):  # a codec that cannot be cut may have made a long run
            part = stack[:, start : start + step].astype(np.float64)
            if factors is not None:
                part *= np.asarray(factors)[:, None]
            mean[start : start + step] = trimmed_mean(part, weights, self._rule.trim)
        return mean


class _Writer:
    """The result of one mean bucket."""

    def __init__(self, bucket: Bucket, memory: ReducerMemory, seed: int, out: Bytes) -> None:
        self._bucket = bucket
        self._codec = codec_of(bucket.result, bucket.shape)
        self._exact = self._codec.spec.exact
        self._seed = seed
        self._out = out[: self._codec.nbytes]
        out[self._codec.nbytes :] = 0
        self._residual: F32 | None = None  # what earlier results lost
        self._state: dict[str, F32] = {}
        if self._exact:
            self._target: F32 = self._out.view("<f4")
            return
        self._target = np.empty(bucket.elements, np.float32)
        self._residual = memory.get(f"residual/{_key(bucket)}", (bucket.elements,))
        for name, fresh in self._codec.state().items():
            kept = memory.get(f"encoder/{_key(bucket)}/{name}", fresh.shape)
            self._state[name] = fresh if kept is None else kept.copy()

    def write(self, first: int, last: int, mean: F64) -> None:
        """Take a run of the mean; ``mean`` is changed."""
        if self._residual is not None:
            mean += self._residual[first:last]
            np.clip(mean, -_LARGEST, _LARGEST, out=mean)  # sums of what peers sent must not become infinite
        self._target[first:last] = mean

    def finish(self) -> dict[str, F32]:
        """Encode; returns what the memory has to keep if the round is committed."""
        if self._exact:
            return {}
        target, key = self._target, _key(self._bucket)
        self._codec.encode(target, self._out, seed=self._seed, state=self._state or None)
        encodings = _Encodings(self._bucket.result, self._bucket.shape, RUN_ELEMENTS)
        for first, last in encodings.runs():
            for values in encodings.decode([self._out], first, last):
                with np.errstate(over="ignore"):
                    target[first:last] -= values
        changes = {f"encoder/{key}/{name}": array for name, array in self._state.items()}
        return {**changes, f"residual/{key}": target}


def _key(bucket: Bucket) -> str:
    """Names a bucket in the memory: packs of several tables may share a name, but no tensor."""
    return bucket.members[0].name


def reduced(weights: Sequence[int]) -> list[int]:
    """The same ratios in the smallest numbers: equal weights are all 1."""
    divisor = int(np.gcd.reduce(weights)) if weights else 1
    return [weight // divisor for weight in weights]
