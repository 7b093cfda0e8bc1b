"""What a sample of votes tells: of honest nodes, coins, opposites, constants, copies and replays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from coordinator.ballots import (
    BUDGET,
    WORDS,
    Ballot,
    Former,
    Sampler,
    affinities,
    correlations,
    judge_agreement,
    judge_words,
)
from optim.aggregate import Bytes
from protos.buckets import Bucket, BucketTable

LINES = 64
TABLE = BucketTable((Bucket.of("w", "majority", [("w", (LINES * 512,))]),))


def honest(voters: int, seed: int, *, share: float = 0.7, nbytes: int = LINES * 64) -> list[Bytes]:
    """Votes each of whose bits is that of a common truth with this probability."""
    rng = np.random.default_rng(seed)
    truth = rng.random(nbytes * 8) < 0.5
    return [np.packbits(truth ^ (rng.random(nbytes * 8) >= share)) for _ in range(voters)]


def judged(rows: Sequence[Bytes], former: Former | None = None, arrival: Sequence[int] = ()) -> list[Ballot]:
    words = Sampler(b"secret").take(TABLE, rows)
    assert words is not None
    return judge_words(words, arrival or range(len(rows)), former or Former(), TABLE.digest)


def test_honest_votes_are_typical() -> None:
    found = judged(honest(8, 1))
    for ballot in found:
        assert ballot.typical == pytest.approx((2 * 0.7 - 1) ** 2, abs=0.02)
        assert abs(ballot.gap) < 0.2 * ballot.typical
        assert not ballot.constant and ballot.copied is None and not ballot.replayed


@pytest.mark.parametrize(("voters", "false"), [(3, 1), (4, 1), (5, 2), (8, 3), (9, 4), (20, 9)])
@pytest.mark.parametrize("kind", ["coin", "opposite", "in league"])
def test_less_than_half_fall_short_whatever_they_do(voters: int, false: int, kind: str) -> None:
    rng, rows = np.random.default_rng(7), honest(voters, 2)
    plot = honest(false, 3, share=0.9)  # they agree with each other more than honest ones do
    for place in range(false):
        if kind == "coin":
            rows[place] = rng.integers(0, 256, LINES * 64, dtype=np.uint8)
        else:
            rows[place] = ~rows[place] if kind == "opposite" else plot[place]
    found = judged(rows)
    shortfalls = [ballot.gap / ballot.typical for ballot in found]
    assert min(shortfalls[:false]) > (1.7 if kind == "opposite" else 0.8)
    assert max(shortfalls[false:]) < 0.3


def test_a_constant_vote_is_not_called_a_copy_or_a_replay() -> None:
    rows, former = honest(5, 1), Former()
    rows[3][:], rows[4][:] = 0, 0
    for _ in range(2):
        found = judged(rows[:3] + rows[3:], former)
        assert [ballot.constant for ballot in found] == [False] * 3 + [True] * 2
        assert found[3].copied is None and found[4].copied is None and not found[4].replayed


def test_of_two_equal_votes_the_later_one_is_the_copy() -> None:
    rows = honest(5, 1)
    rows[0] = rows[3].copy()
    rows[0][::80] ^= 1  # not every bit has to be the same
    found = judged(rows, arrival=[9, 0, 1, 2, 3])
    assert [ballot.copied for ballot in found] == [3, None, None, None, None]
    assert abs(found[3].gap) < 0.2 * found[3].typical, "the copy does not harm its original"


def test_votes_of_former_rounds_are_known_again() -> None:
    former = Former()
    rounds = [honest(4, seed) for seed in range(3)]
    for rows in rounds:
        assert not any(ballot.replayed for ballot in judged(rows, former))
    again = honest(4, 9)
    again[1], again[2] = rounds[0][1], rounds[1][3]  # its own, and another's
    assert [ballot.replayed for ballot in judged(again, former)] == [False, True, True, False]


def test_bits_that_all_cast_alike_prove_no_copy() -> None:
    """Where nobody has a gradient all votes are the same hash bits, and differ from round to round."""
    rng, former = np.random.default_rng(0), Former()
    for seed in range(3):
        common = rng.integers(0, 256, LINES * 56, dtype=np.uint8)
        rows = [np.concatenate([common, row]) for row in honest(4, seed, nbytes=LINES * 8)]
        assert all(ballot.copied is None and not ballot.replayed for ballot in judged(rows, former))


def test_two_voters_are_not_judged() -> None:
    rows = honest(2, 1)
    rows[1] = rows[0]
    assert all(ballot.copied is None and not ballot.gap <= 0 for ballot in judged(rows))


def test_the_sample_takes_no_padding_and_only_votes() -> None:
    table = BucketTable(
        (
            Bucket.of("m", "mean", [("m", (100,))]),
            Bucket.of("a", "majority", [("a", (700,))]),  # ten words, then padding
            Bucket.of("b", "majority", [("b", (63,))]),  # no whole word
        )
    )
    row = np.zeros(table.nbytes, np.uint8)
    start = table.offsets[1]
    row[start : start + 80] = np.repeat(np.arange(10, dtype=np.uint8), 8)
    words = Sampler(b"secret").take(table, [row, row])
    assert words is not None and sorted(words[0] & 255) == list(range(10))
    other = Sampler(b"another").take(table, [row, row])
    assert other is not None and (words != other).any(), "the places depend on the secret"
    means = BucketTable((Bucket.of("m", "mean", [("m", (1000,))]),))
    assert Sampler(b"secret").take(means, [np.zeros(means.nbytes, np.uint8)]) is None


def test_the_work_of_a_round_is_bounded() -> None:
    rows = honest(1, 1) * 200
    words = Sampler(b"secret").take(TABLE, rows)
    assert words is not None and words.size <= BUDGET and words.shape[1] < WORDS
    former = Former()
    former.keep(TABLE.digest, words)
    assert former.holds(TABLE.digest, words[:2], np.arange(40)) == [True, True]


def test_correlations_and_affinities_equal_their_definition() -> None:
    words = np.stack([row.view("<u8") for row in honest(5, 4)])
    bits = np.unpackbits(words.view(np.uint8), axis=1).astype(np.int64) * 2 - 1
    pairs = correlations(words)
    np.testing.assert_allclose(pairs, bits @ bits.T / bits.shape[1], atol=1e-12)
    for index, tie in enumerate(affinities(pairs, range(5))):
        assert tie == sorted((pairs[index, other] for other in range(5) if other != index), reverse=True)[1]


def test_shares_of_agreement_tell_the_same_where_no_votes_are_seen() -> None:
    rows = honest(8, 5)
    for place in (1, 4, 6):
        rows[place] = ~rows[place]
    signs = np.stack([np.unpackbits(row) for row in rows]).astype(np.int64) * 2 - 1
    result = np.where(signs.sum(axis=0) == 0, signs[0], np.sign(signs.sum(axis=0)))
    agreement = [float((vote == result).mean()) for vote in signs]
    found = judge_agreement(agreement, [1] * 8)
    named = [index for index, ballot in enumerate(found) if ballot.gap > 0.8 * ballot.typical > 0]
    assert named == [1, 4, 6]
    coins = judge_agreement([0.5 + 0.5 * 0.282] * 8, [1] * 8)
    assert all(abs(ballot.typical) < 0.001 for ballot in coins), "fair coins are no more than coins"
    assert all(ballot.gap != ballot.gap for ballot in judge_agreement([float("nan")] * 4, [1] * 4))
