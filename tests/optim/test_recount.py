"""Lines made a second time are those of the whole reduction, and what is called certain is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.aggregate import Aggregation, ReducerMemory, casting_voter
from optim.bits import tally
from optim.pieces import cut
from optim.recount import Line, Recountable, Terms, recount
from optim.reduction import Reduction
from protos import wire
from protos.buckets import LINE_BYTES, Bucket, BucketTable, MeanRule
from tests.coordinator.contribution_rig import coded_table, mixed_table, random_payload, voted_table

TABLES = {
    "votes": voted_table(7),
    "mixed": mixed_table(),
    "coded": coded_table(),
    "trimmed": coded_table("fp32", MeanRule(trim=1)),
    "clipped": coded_table("fp32", MeanRule(clip=1.0)),
}
NUMBERS = {  # of lines that can be made anew; the others hang together with more than a line
    "votes": 7,
    "mixed": 1 + 2 + 3,
    "coded": 1 + 24 + 2,
    "trimmed": 1 + 23 + 24 + 2,
    "clipped": 1,
}


def result_of(
    table: BucketTable, payloads: Sequence[bytes], weights: Sequence[int], round_index: int
) -> bytes:
    """By the reducer of a round."""
    rows = [np.frombuffer(payload, np.uint8).copy() for payload in payloads]
    aggregation = Aggregation(
        table,
        len(rows),
        round_index=round_index,
        tally=tally,
        memory=ReducerMemory(),
        weights=list(weights),
        mean_weights=[2 * weight for weight in weights],
    )
    frames = Reduction(cut(table, 1 << 20), aggregation, rows).advance(table.nbytes)
    return b"".join(bytes(wire.decode_frame(frame).body) for frame in frames)


def at(data: bytes, starts: Sequence[int]) -> np.ndarray:
    parts = [data[start : start + LINE_BYTES] for start in starts]
    return np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), LINE_BYTES)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("voters", [1, 2, 5])
def test_all_lines_that_can_be_made_anew_are_as_they_were_made(name: str, voters: int) -> None:
    table, weights = TABLES[name], [3, 1, 2, 65535, 1][:voters]
    payloads = [random_payload(seed, table) for seed in range(voters)]
    for bucket, start in zip(table.buckets, table.offsets, strict=True):
        if bucket.reduce == "mean" and bucket.codec == "fp32":  # a false node's padding may be anything
            dirty = bytearray(payloads[0])
            dirty[start + 4 * bucket.elements : start + bucket.nbytes] = bytes(
                b"\x00\x00\x80\x3f" * ((bucket.nbytes - 4 * bucket.elements) // 4)
            )
            payloads[0] = bytes(dirty)
    found = Recountable(table)
    assert found.count == NUMBERS[name]
    lines = [found.line(number) for number in range(found.count)]
    terms = Terms(3, table.rule, tally, weights, [2 * weight for weight in weights])
    made, certain = recount(terms, lines, [at(row, [line.start for line in lines]) for row in payloads])
    result = result_of(table, payloads, weights, 3)
    assert (made == at(result, [line.out_start for line in lines])).all() and (certain == 0xFF).all()


def test_which_lines_a_table_has() -> None:
    found = Recountable(mixed_table())
    assert [found.line(number) for number in range(4)] == [
        Line(0, 0, "majority"),
        Line(64, 64, "mean"),
        Line(128, 128, "mean"),
        Line(192, 192, "majority"),
    ]
    trimmed = BucketTable((Bucket.of("m", "mean", [("m", (17,))]),), MeanRule(trim=1))
    assert [Recountable(trimmed).line(number).real for number in range(2)] == [64, 4]


def reference(votes: Sequence[str | None], weights: Sequence[int], casting: int) -> list[bool | None]:
    """Bit by bit: what every way to fill in the votes that are not known agrees on; ``None``: nothing."""
    found: list[bool | None] = []
    for place in range(LINE_BYTES * 8):
        known = {i: vote[place] == "1" for i, vote in enumerate(votes) if vote is not None}
        missing = [i for i in range(len(votes)) if i not in known]
        outcomes = set()
        for filled in (False, True):
            cast = {**known, **dict.fromkeys(missing, filled)}
            yes = sum(weight for i, weight in enumerate(weights) if cast[i])
            half = Fraction(sum(weights), 2)
            outcomes.add(cast[casting] if yes == half else yes > half)
        found.append(outcomes.pop() if len(outcomes) == 1 else None)
    return found


@given(data=st.data(), voters=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_what_is_certain_with_votes_that_are_not_known(data: st.DataObject, voters: int, seed: int) -> None:
    weights = data.draw(st.lists(st.integers(1, 3), min_size=voters, max_size=voters))
    missing = data.draw(st.sets(st.integers(0, voters - 1)))
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, 256, (1, LINE_BYTES), dtype=np.uint8) for _ in range(voters)]
    shown = [None if i in missing else row for i, row in enumerate(rows)]
    terms = Terms(seed, MeanRule(), tally, weights, weights)
    made, certain = recount(terms, [Line(0, 0, "majority")], shown)
    votes = [
        None if row is None else "".join(map(str, np.unpackbits(row, bitorder="little"))) for row in shown
    ]
    expected = reference(votes, weights, casting_voter(seed, voters))
    sure = np.unpackbits(certain, bitorder="little").astype(bool).tolist()
    bits = np.unpackbits(made, bitorder="little").astype(bool).tolist()
    assert sure == [bit is not None for bit in expected]
    assert all(bit == want for bit, want in zip(bits, expected, strict=True) if want is not None)


def test_a_mean_is_certain_only_with_all_its_values() -> None:
    terms = Terms(0, MeanRule(), tally, [1, 1], [1, 1])
    row = np.full((1, LINE_BYTES), 0xFF, np.uint8)  # not even numbers: a voter may show anything
    lines = [Line(0, 0, "mean")]
    assert (recount(terms, lines, [row, row])[1] == 0xFF).all()
    assert not recount(terms, lines, [row, None])[1].any()
